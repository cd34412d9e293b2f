// Blocks of weights, a run of 32 values at a time.
//
// A weight lies on the device in planes: for every block the largest field, then for every block the next one, so that
// each can be read in whole words (gpu.py has the table; the fields are those of ggml-common.h). A run is four units of
// two quads each: values first(run) + 4 u ... +3 of the block, and the same DELTA further on. All near quads of a run
// share a scale, and so do all far ones. (Plain numbers have their units STEP apart instead of 4.)
//
// `load` reads the words of a run, `unit` makes the eight numbers f of one unit, `scales` gives for near and far scale
// and offset: a value is scale * f + offset. Small integers q of B bits come as f = 1 + q / 2^B: their bits are put
// into a float's mantissa, which takes no conversion. Without OFFSETS all offsets are zero.

typedef const DEVICE uint8_t *Bytes;

template <int OFFSET, int SIZE> FUNCTION Bytes field(Bytes base, uint64_t total, uint64_t block) {
  return base + OFFSET * total + block * SIZE;
}

FUNCTION float place_bits(uint q, uint shift) { return bits_to_float(0x3F800000u | q << shift); }

// Four fields of B bits, one in each byte of `word`, as 1 + q / 2^B.
template <int B> FUNCTION void place_quad(uint word, PRIVATE float *f) {
  const uint mask = (1u << B) - 1u;
  f[0] = place_bits(word & mask, 23 - B);
  f[1] = place_bits(word >> 8 & mask, 23 - B);
  f[2] = place_bits(word >> 16 & mask, 23 - B);
  f[3] = place_bits(word >> 24 & mask, 23 - B);
}

// Value step * (q + low) + extra with f = 1 + q / 2^B: scale and offset.
template <int B> FUNCTION void fit(float step, float low, float extra, int quad, PRIVATE float *scale,
                                   PRIVATE float *offset) {
  scale[quad] = step * float(1 << B);
  offset[quad] = step * (low - float(1 << B)) + extra;
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
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int, PRIVATE uint *w) {
    load_nibbles(field<0, 16>(base, total, block), w);
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_both<4>(half_at(field<16, 2>(base, total, block)), -8.0f, 0.0f, scale, offset);
  }
};

struct Q4_1 : Integers<4>, OneRun {
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int, PRIVATE uint *w) {
    load_nibbles(field<0, 16>(base, total, block), w);
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int, PRIVATE float *scale,
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
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int, PRIVATE uint *w) {
    load_fives(field<0, 16>(base, total, block), field<16, 4>(base, total, block), w);
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_both<5>(half_at(field<20, 2>(base, total, block)), -16.0f, 0.0f, scale, offset);
  }
};

struct Q5_1 : Integers<5>, OneRun {
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int, PRIVATE uint *w) {
    load_fives(field<0, 16>(base, total, block), field<16, 4>(base, total, block), w);
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int, PRIVATE float *scale,
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
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int, PRIVATE uint *w) {
    load_signed(field<0, 32>(base, total, block), w);
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_both<8>(half_at(field<32, 2>(base, total, block)), -128.0f, 0.0f, scale, offset);
  }
};

struct Q8_K : Integers<8> {
  enum { BLOCK = 256, RUNS = 8, DELTA = 16 };
  static FUNCTION int first(int run) { return 32 * run; }
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE uint *w) {
    load_signed(field<0, 256>(base, total, block) + 32 * run, w);
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_both<8>(bits_to_float(load_u32(field<256, 4>(base, total, block))), -128.0f, 0.0f, scale, offset);
  }
};

// Two-bit fields: runs 4 h + 2 p + q are sixteen bytes q of half h, at bits 4 p (near) and 4 p + 2 (far).
struct Twos {
  enum { BLOCK = 256, RUNS = 8, DELTA = 32 };
  static FUNCTION int first(int run) { return 128 * (run / 4) + 64 * (run / 2 % 2) + 16 * (run % 2); }
  static FUNCTION void split(Bytes values, int run, PRIVATE uint *w) {
    load_words(values + 32 * (run / 4) + 16 * (run % 2), w);
    UNROLL
    for (int u = 0; u < 4; ++u) {
      const uint word = w[u] >> (4 * (run / 2 % 2));
      w[u] = word & 0x03030303u;
      w[4 + u] = word >> 2 & 0x03030303u;
    }
  }
  static FUNCTION int group(int run) { return 8 * (run / 4) + 4 * (run / 2 % 2) + run % 2; }
};

struct Q2_K : Integers<2>, Twos {
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE uint *w) {
    split(field<0, 64>(base, total, block), run, w);
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE float *scale,
                              PRIVATE float *offset) {
    Bytes both = field<80, 4>(base, total, block), groups = field<64, 16>(base, total, block) + group(run);
    const float d = half_at(both), low = half_at(both + 2);
    const uint a = groups[0], b = groups[2];
    fit<2>(d * float(a & 15u), 0.0f, -low * float(a >> 4), 0, scale, offset);
    fit<2>(d * float(b & 15u), 0.0f, -low * float(b >> 4), 1, scale, offset);
  }
};

struct Q3_K : Integers<3>, Twos {
  static FUNCTION float scale_of(Bytes groups, int i) {
    const uint low = uint(groups[i % 8]) >> (4 * (i / 8)) & 15u, high = uint(groups[8 + i % 4]) >> (2 * (i / 4)) & 3u;
    return float(int(low | high << 4) - 32);
  }
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE uint *w) {
    uint high[4];
    load_words(field<64, 32>(base, total, block) + 16 * (run % 2), high);
    split(field<0, 64>(base, total, block), run, w);
    const uint bit = 4 * (run / 4) + 2 * (run / 2 % 2);
    UNROLL
    for (int u = 0; u < 4; ++u) {
      w[u] |= spread_bit(high[u], bit, 2);
      w[4 + u] |= spread_bit(high[u], bit + 1, 2);
    }
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE float *scale,
                              PRIVATE float *offset) {
    const float d = half_at(field<108, 2>(base, total, block));
    Bytes groups = field<96, 12>(base, total, block);
    fit<3>(d * scale_of(groups, group(run)), -4.0f, 0.0f, 0, scale, offset);
    fit<3>(d * scale_of(groups, group(run) + 2), -4.0f, 0.0f, 1, scale, offset);
  }
};

// The sixteen bytes that open a block of q4_k and q5_k: two halves, then six-bit scales and minima of eight groups.
template <int B> FUNCTION void fit_sixes(Bytes head, int chunk, PRIVATE float *scale, PRIVATE float *offset) {
  uint w[4];
  load_words(head, w);
  const float d = half_bits_to_float(w[0] & 0xFFFFu), least = half_bits_to_float(w[0] >> 16);
  const uint shift = 16 * (chunk % 2), s = w[1] >> shift, m = w[2] >> shift, more = w[3] >> shift;
  const bool late = chunk >= 2;
  const uint step0 = late ? (more & 15u) | (s >> 2 & 48u) : s & 63u;
  const uint step1 = late ? (more >> 8 & 15u) | (s >> 10 & 48u) : s >> 8 & 63u;
  const uint low0 = late ? (more >> 4 & 15u) | (m >> 2 & 48u) : m & 63u;
  const uint low1 = late ? (more >> 12 & 15u) | (m >> 10 & 48u) : m >> 8 & 63u;
  fit<B>(d * float(step0), 0.0f, -least * float(low0), 0, scale, offset);
  fit<B>(d * float(step1), 0.0f, -least * float(low1), 1, scale, offset);
}

struct Chunks {
  enum { BLOCK = 256, RUNS = 8, DELTA = 32 };
  static FUNCTION int first(int run) { return 64 * (run / 2) + 16 * (run % 2); }
};

struct Q4_K : Integers<4>, Chunks {
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE uint *w) {
    load_nibbles(field<0, 144>(base, total, block) + 16 + 16 * run, w);
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_sixes<4>(field<0, 144>(base, total, block), run / 2, scale, offset);
  }
};

struct Q5_K : Integers<5>, Chunks {
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE uint *w) {
    Bytes start = field<0, 176>(base, total, block);
    uint high[4];
    load_words(start + 16 + 16 * (run % 2), high);
    load_nibbles(start + 48 + 16 * run, w);
    const uint bit = 2 * (run / 2);
    UNROLL
    for (int u = 0; u < 4; ++u) {
      w[u] |= spread_bit(high[u], bit, 4);
      w[4 + u] |= spread_bit(high[u], bit + 1, 4);
    }
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_sixes<5>(field<0, 176>(base, total, block), run / 2, scale, offset);
  }
};

struct Q6_K : Integers<6> {
  enum { BLOCK = 256, RUNS = 8, DELTA = 64 };
  static FUNCTION int first(int run) { return 128 * (run / 4) + 16 * (run % 4); }
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE uint *w) {
    const int half = run / 4, quarter = run % 4;
    uint high[4];
    load_words(field<128, 64>(base, total, block) + 32 * half + 16 * (quarter % 2), high);
    load_nibbles(field<0, 128>(base, total, block) + 64 * half + 16 * quarter, w);
    UNROLL
    for (int u = 0; u < 4; ++u) {
      const uint word = high[u] >> (2 * (quarter / 2));
      w[u] |= (word & 0x03030303u) << 4;
      w[4 + u] |= word & 0x30303030u;
    }
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE float *scale,
                              PRIVATE float *offset) {
    const float d = half_at(field<208, 2>(base, total, block));
    Bytes groups = field<192, 16>(base, total, block) + 8 * (run / 4) + run % 4;
    fit<6>(d * float(int(groups[0] ^ 128u) - 128), -32.0f, 0.0f, 0, scale, offset);
    fit<6>(d * float(int(groups[4] ^ 128u) - 128), -32.0f, 0.0f, 1, scale, offset);
  }
};

TABLE float IQ4_VALUES[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f,
                              1.0f,    13.0f,   25.0f,  38.0f,  53.0f,  69.0f,  89.0f,  113.0f};
TABLE float FP4_VALUES[16] = {0.0f,  1.0f,  2.0f,  3.0f,  4.0f,  6.0f,  8.0f,  12.0f,
                              -0.0f, -1.0f, -2.0f, -3.0f, -4.0f, -6.0f, -8.0f, -12.0f}; // doubled, as in ggml

struct Listed { // numbers out of a table
  enum { STEP = 4, WORDS = 8, OFFSETS = 0 };
  static FUNCTION void pack_terms(float scale, float offset, PRIVATE uint *step, PRIVATE uint *low) {
    *step = float_to_bits(scale);
    *low = float_to_bits(offset);
  }
};

struct IQ4 : Listed {
  static FUNCTION void pairs(PRIVATE const uint *w, int u, PRIVATE const uint *step, PRIVATE const uint *low,
                             PRIVATE uint *out) {
    float f[8];
    unit(w, u, f);
    scale_pairs(f, step, low, out);
  }
  static FUNCTION void unit(PRIVATE const uint *w, int u, PRIVATE float *f) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
      f[i] = IQ4_VALUES[w[u] >> (8 * i) & 15u];
      f[4 + i] = IQ4_VALUES[w[4 + u] >> (8 * i) & 15u];
    }
  }
};

struct IQ4_NL : IQ4, OneRun {
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int, PRIVATE uint *w) {
    load_nibbles(field<0, 16>(base, total, block), w);
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    scale[0] = scale[1] = half_at(field<16, 2>(base, total, block));
    offset[0] = offset[1] = 0.0f;
  }
};

struct IQ4_XS : IQ4 {
  enum { BLOCK = 256, RUNS = 8, DELTA = 16 };
  static FUNCTION int first(int run) { return 32 * run; }
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE uint *w) {
    load_nibbles(field<0, 128>(base, total, block) + 16 * run, w);
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE float *scale,
                              PRIVATE float *offset) {
    Bytes both = field<132, 4>(base, total, block), lows = field<128, 4>(base, total, block);
    const uint low = uint(lows[run / 2]) >> (4 * (run % 2)) & 15u, high = load_u16(both + 2) >> (2 * run) & 3u;
    scale[0] = scale[1] = half_at(both) * float(int(low | high << 4) - 32);
    offset[0] = offset[1] = 0.0f;
  }
};

struct MXFP4 : Listed, OneRun {
  static FUNCTION void pairs(PRIVATE const uint *w, int u, PRIVATE const uint *step, PRIVATE const uint *low,
                             PRIVATE uint *out) {
    float f[8];
    unit(w, u, f);
    scale_pairs(f, step, low, out);
  }
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int, PRIVATE uint *w) {
    load_nibbles(field<0, 16>(base, total, block), w);
  }
  static FUNCTION void unit(PRIVATE const uint *w, int u, PRIVATE float *f) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
      f[i] = FP4_VALUES[w[u] >> (8 * i) & 15u];
      f[4 + i] = FP4_VALUES[w[4 + u] >> (8 * i) & 15u];
    }
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    const uint exponent = field<16, 1>(base, total, block)[0];
    // 2^(exponent - 128); the two smallest are subnormal
    scale[0] = scale[1] = bits_to_float(exponent > 1u ? (exponent - 1u) << 23 : 0x00200000u << exponent);
    offset[0] = offset[1] = 0.0f;
  }
};

// What MLX calls affine: integers, and scale and bias of one or two runs in f32.
template <int R> struct Affine {
  enum { BLOCK = 32 * R, RUNS = R, DELTA = 16 };
  static FUNCTION int first(int run) { return 32 * run; }
};

template <int R> struct Affine4 : Integers<4>, Affine<R> {
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE uint *w) {
    load_nibbles(field<0, 16 * R>(base, total, block) + 16 * run, w);
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    Bytes both = field<16 * R, 8>(base, total, block);
    fit_both<4>(bits_to_float(load_u32(both)), 0.0f, bits_to_float(load_u32(both + 4)), scale, offset);
  }
};

template <int R> struct Affine8 : Integers<8>, Affine<R> {
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE uint *w) {
    Bytes from = field<0, 32 * R>(base, total, block) + 32 * run;
    load_words(from, w);
    load_words(from + 16, w + 4);
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    Bytes both = field<32 * R, 8>(base, total, block);
    fit_both<8>(bits_to_float(load_u32(both)), 0.0f, bits_to_float(load_u32(both + 4)), scale, offset);
  }
};

// Plain numbers of 16 bits, eight neighbours to a unit, so that neighbouring runs read neighbouring words.
struct Plain {
  enum { BLOCK = 256, RUNS = 8, DELTA = 4, STEP = 64, WORDS = 16, OFFSETS = 0 };
  static FUNCTION int first(int run) { return 8 * run; }
  static FUNCTION void load(Bytes base, uint64_t, uint64_t block, int run, PRIVATE uint *w) {
    UNROLL
    for (int u = 0; u < 4; ++u)
      load_words(base + block * 512 + 128 * u + 16 * run, w + 4 * u);
  }
  static FUNCTION void scales(Bytes, uint64_t, uint64_t, int, PRIVATE float *scale, PRIVATE float *offset) {
    scale[0] = scale[1] = 1.0f;
    offset[0] = offset[1] = 0.0f;
  }
};
struct F16 : Plain {
  static FUNCTION void unit(PRIVATE const uint *w, int u, PRIVATE float *f) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
      f[2 * i] = half_bits_to_float(w[4 * u + i] & 0xFFFFu);
      f[2 * i + 1] = half_bits_to_float(w[4 * u + i] >> 16);
    }
  }
};
struct BF16 : Plain {
  static FUNCTION void unit(PRIVATE const uint *w, int u, PRIVATE float *f) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
      f[2 * i] = bits_to_float(w[4 * u + i] << 16);
      f[2 * i + 1] = bits_to_float(w[4 * u + i] & 0xFFFF0000u);
    }
  }
};

// By the numbers that ggml gives the types, and our own ones.
template <int ID> struct Blocks {};
template <> struct Blocks<1> { typedef F16 type; };
template <> struct Blocks<2> { typedef Q4_0 type; };
template <> struct Blocks<3> { typedef Q4_1 type; };
template <> struct Blocks<6> { typedef Q5_0 type; };
template <> struct Blocks<7> { typedef Q5_1 type; };
template <> struct Blocks<8> { typedef Q8_0 type; };
template <> struct Blocks<10> { typedef Q2_K type; };
template <> struct Blocks<11> { typedef Q3_K type; };
template <> struct Blocks<12> { typedef Q4_K type; };
template <> struct Blocks<13> { typedef Q5_K type; };
template <> struct Blocks<14> { typedef Q6_K type; };
template <> struct Blocks<15> { typedef Q8_K type; };
template <> struct Blocks<20> { typedef IQ4_NL type; };
template <> struct Blocks<23> { typedef IQ4_XS type; };
template <> struct Blocks<30> { typedef BF16 type; };
template <> struct Blocks<39> { typedef MXFP4 type; };
template <> struct Blocks<432> { typedef Affine4<1> type; };
template <> struct Blocks<464> { typedef Affine4<2> type; };
template <> struct Blocks<832> { typedef Affine8<1> type; };
template <> struct Blocks<864> { typedef Affine8<2> type; };
