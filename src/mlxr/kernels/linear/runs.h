// Blocks of weights, a run of 32 values at a time: what all types share, and those whose scales are plain numbers.
//
// A weight lies on the device in planes: for every block the largest field, then for every block the next one, so that
// each can be read in whole words (parts.py has the table; the fields are those of ggml-common.h). A run is four units of
// two quads each: values first(run) + 4 u ... +3 of the block, and the same DELTA further on. All near quads of a run
// share a scale, and so do all far ones. (Plain numbers have their units STEP apart instead of 4.)
//
// `load` reads the words of a run, `unit` makes the eight numbers f of one unit, `scales` gives for near and far scale
// and offset: a value is scale * f + offset. Small integers q of B bits come as f = 1 + q / 2^B: their bits are put
// into a float's mantissa, which takes no conversion. Where place_halves is a word (HAS_HALVES), f = q: shifts take four
// times as long as other operations there, and two bytes have one. Without OFFSETS all offsets are zero.

typedef const DEVICE uint8_t *Bytes;

template <int OFFSET, int SIZE> FUNCTION Bytes field(Bytes base, Offset total, Offset block) {
  return base + OFFSET * total + block * SIZE;
}

FUNCTION float place_bits(uint q, uint shift) { return bits_to_float(0x3F800000u | q << shift); }

// Four fields of B bits, one in each byte of `word`, as 1 + q / 2^B.
template <int B> FUNCTION void place_quad(uint word, PRIVATE float *f) {
#ifdef HAS_HALVES
  place_halves(word, f);
#else
  const uint mask = (1u << B) - 1u;
  f[0] = place_bits(word & mask, 23 - B);
  f[1] = place_bits(word >> 8 & mask, 23 - B);
  f[2] = place_bits(word >> 16 & mask, 23 - B);
  f[3] = place_bits(word >> 24 & mask, 23 - B);
#endif
}

// Value step * (q + low) + extra with f: scale and offset.
template <int B> FUNCTION void fit(float step, float low, float extra, int quad, PRIVATE float *scale,
                                   PRIVATE float *offset) {
#ifdef HAS_HALVES
  scale[quad] = step;
  offset[quad] = step * low + extra;
#else
  scale[quad] = step * float(1 << B);
  offset[quad] = step * (low - float(1 << B)) + extra;
#endif
}
template <int B> FUNCTION void fit_both(float step, float low, float extra, PRIVATE float *scale,
                                        PRIVATE float *offset) {
  fit<B>(step, low, extra, 0, scale, offset);
  scale[1] = scale[0];
  offset[1] = offset[0];
}

FUNCTION float half_at(Bytes p) { return half_bits_to_float(load_u16(p)); }

// Sixteen bytes as two nibbles each: low ones are near, high ones far.
FUNCTION void load_nibbles(Bytes p, PRIVATE uint *w) {
  load_words(p, w);
  UNROLL
  for (int u = 0; u < 4; ++u) {
    w[4 + u] = w[u] >> 4 & 0x0F0F0F0Fu;
    w[u] &= 0x0F0F0F0Fu;
  }
}

// Bit `bit` of each byte of `word`, moved to bit `to` of that byte.
FUNCTION uint spread_bit(uint word, uint bit, uint to) { return (word >> bit & 0x01010101u) << to; }
// The lowest four bits of `bits`, each to bit 4 of a byte.
FUNCTION uint spread_four(uint bits) {
  return (bits & 1u) << 4 | (bits & 2u) << 11 | (bits & 4u) << 18 | (bits & 8u) << 25;
}

// Pairs of neighbours in 16 bits, near and far, scaled in f32; the terms are the bits of floats.
FUNCTION void scale_pairs(PRIVATE const float *f, PRIVATE const uint *scale, PRIVATE const uint *offset,
                          PRIVATE uint *out) {
  UNROLL
  for (int i = 0; i < 4; ++i) {
    const float s = bits_to_float(scale[i / 2]), o = bits_to_float(offset[i / 2]);
    out[i] = pack_pair(f[2 * i] * s + o, f[2 * i + 1] * s + o);
  }
}

template <int B> struct Integers {
  enum { STEP = 4, WORDS = 8, OFFSETS = 1 };
  // In 16 bits: terms of numbers q instead of f = 1 + q / 2^B.
  static FUNCTION void pack_terms(float scale, float offset, PRIVATE uint *step, PRIVATE uint *low) {
    const float each = scale / float(1 << B), least = offset + scale + (B == 8 ? 128.0f * each : 0.0f);
    *step = pack_pair(each, each);
    *low = pack_pair(least, least);
  }
  // 128 + q is exact in bf16, and so is q then.
  static FUNCTION void pairs(PRIVATE const uint *w, int u, PRIVATE const uint *step, PRIVATE const uint *low,
                             PRIVATE uint *out) {
    const uint one = 0x3F803F80u;
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint word = w[4 * (i / 2) + u];
      uint q;
      if (B == 8) { // bytes 128 + q: of those from 128 on 128 is taken, of the others 256
        const uint sign = word & 0x80808080u;
        const uint less = i % 2 ? (sign >> 16 & 0x80u) | (sign >> 8 & 0x800000u)
                                : (sign & 0x80u) | (sign << 8 & 0x800000u);
        q = multiply_pairs(widen_bytes(word & 0x7F7F7F7Fu, i % 2), one, less ^ 0xC380C380u);
      } else {
        q = multiply_pairs(widen_bytes(word, i % 2), one, 0xC300C300u);
      }
      out[i] = multiply_pairs(q, step[i / 2], low[i / 2]);
    }
  }
  static FUNCTION void unit(PRIVATE const uint *w, int u, PRIVATE float *f) {
    place_quad<B>(w[u], f);
    place_quad<B>(w[4 + u], f + 4);
  }
};
struct OneRun {
  enum { BLOCK = 32, RUNS = 1, DELTA = 16 };
  static FUNCTION int first(int) { return 0; }
};

struct Q4_0 : Integers<4>, OneRun {
  static FUNCTION void load(Bytes base, Offset total, Offset block, int, PRIVATE uint *w) {
    load_nibbles(field<0, 16>(base, total, block), w);
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_both<4>(half_at(field<16, 2>(base, total, block)), -8.0f, 0.0f, scale, offset);
  }
};

struct Q4_1 : Integers<4>, OneRun {
  static FUNCTION void load(Bytes base, Offset total, Offset block, int, PRIVATE uint *w) {
    load_nibbles(field<0, 16>(base, total, block), w);
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    Bytes both = field<16, 4>(base, total, block);
    fit_both<4>(half_at(both), 0.0f, half_at(both + 2), scale, offset);
  }
};

FUNCTION void load_fives(Bytes nibbles, Bytes high, PRIVATE uint *w) {
  const uint bits = load_u32(high);
  load_nibbles(nibbles, w);
  UNROLL
  for (int u = 0; u < 8; ++u)
    w[u] |= spread_four(bits >> (4 * u));
}

struct Q5_0 : Integers<5>, OneRun {
  static FUNCTION void load(Bytes base, Offset total, Offset block, int, PRIVATE uint *w) {
    load_fives(field<0, 16>(base, total, block), field<16, 4>(base, total, block), w);
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_both<5>(half_at(field<20, 2>(base, total, block)), -16.0f, 0.0f, scale, offset);
  }
};

struct Q5_1 : Integers<5>, OneRun {
  static FUNCTION void load(Bytes base, Offset total, Offset block, int, PRIVATE uint *w) {
    load_fives(field<0, 16>(base, total, block), field<16, 4>(base, total, block), w);
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    Bytes both = field<20, 4>(base, total, block);
    fit_both<5>(half_at(both), 0.0f, half_at(both + 2), scale, offset);
  }
};

FUNCTION void load_signed(Bytes p, PRIVATE uint *w) {
  load_words(p, w);
  load_words(p + 16, w + 4);
  UNROLL
  for (int u = 0; u < 8; ++u)
    w[u] ^= 0x80808080u;
}

struct Q8_0 : Integers<8>, OneRun {
  static FUNCTION void load(Bytes base, Offset total, Offset block, int, PRIVATE uint *w) {
    load_signed(field<0, 32>(base, total, block), w);
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_both<8>(half_at(field<32, 2>(base, total, block)), -128.0f, 0.0f, scale, offset);
  }
};

struct Q8_K : Integers<8> {
  enum { BLOCK = 256, RUNS = 8, DELTA = 16 };
  static FUNCTION int first(int run) { return 32 * run; }
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
    load_signed(field<0, 256>(base, total, block) + 32 * run, w);
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_both<8>(bits_to_float(load_u32(field<256, 4>(base, total, block))), -128.0f, 0.0f, scale, offset);
  }
};

#define GRID(name, count) TABLE unsigned short name[count] // see core/grids.h
