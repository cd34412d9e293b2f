// Blocks of quantised weights, eight values (a unit) at a time, straight from the layout of the file (ggml-common.h).
//
// A unit is two quads: values first(unit) ... +3 of the block, and the same DELTA further on. `unit` gives for each
// quad four numbers f, a scale and an offset, so that a value is scale * f + offset. Small integers q of B bits come
// as f = 1 + q / 2^B: their bits are put into a float's mantissa, which takes no conversion.
//
// A block has BLOCK values in BYTES bytes and UNITS units.

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

FUNCTION uint load_bytes4(const DEVICE uint8_t *p) {
  return uint(p[0]) | uint(p[1]) << 8 | uint(p[2]) << 16 | uint(p[3]) << 24;
}
FUNCTION uint load_pair4(const DEVICE uint8_t *p) { return load_u16(p) | load_u16(p + 2) << 16; }

// Bit `bit` of each byte of `word`, moved to bit `to` of that byte.
FUNCTION uint spread_bit(uint word, uint bit, uint to) { return (word >> bit & 0x01010101u) << to; }
// The lowest four bits of `bits`, each to bit 4 of a byte.
FUNCTION uint spread_four(uint bits) {
  return (bits & 1u) << 4 | (bits & 2u) << 11 | (bits & 4u) << 18 | (bits & 8u) << 25;
}

struct Q4_0 {
  enum { BLOCK = 32, BYTES = 18, UNITS = 4, DELTA = 16 };
  static FUNCTION int first(int unit) { return 4 * unit; }
  static FUNCTION void unit(const DEVICE uint8_t *block, int unit, PRIVATE float *f, PRIVATE float *scale,
                            PRIVATE float *offset) {
    const float d = half_bits_to_float(load_u16(block));
    const uint word = load_pair4(block + 2 + 4 * unit);
    place_quad<4>(word & 0x0F0F0F0Fu, f);
    place_quad<4>(word >> 4 & 0x0F0F0F0Fu, f + 4);
    fit<4>(d, -8.0f, 0.0f, 0, scale, offset);
    fit<4>(d, -8.0f, 0.0f, 1, scale, offset);
  }
};

struct Q4_1 {
  enum { BLOCK = 32, BYTES = 20, UNITS = 4, DELTA = 16 };
  static FUNCTION int first(int unit) { return 4 * unit; }
  static FUNCTION void unit(const DEVICE uint8_t *block, int unit, PRIVATE float *f, PRIVATE float *scale,
                            PRIVATE float *offset) {
    const float d = half_bits_to_float(load_u16(block)), low = half_bits_to_float(load_u16(block + 2));
    const uint word = load_u32(block + 4 + 4 * unit);
    place_quad<4>(word & 0x0F0F0F0Fu, f);
    place_quad<4>(word >> 4 & 0x0F0F0F0Fu, f + 4);
    fit<4>(d, 0.0f, low, 0, scale, offset);
    fit<4>(d, 0.0f, low, 1, scale, offset);
  }
};

struct Q5_0 {
  enum { BLOCK = 32, BYTES = 22, UNITS = 4, DELTA = 16 };
  static FUNCTION int first(int unit) { return 4 * unit; }
  static FUNCTION void unit(const DEVICE uint8_t *block, int unit, PRIVATE float *f, PRIVATE float *scale,
                            PRIVATE float *offset) {
    const float d = half_bits_to_float(load_u16(block));
    const uint high = load_pair4(block + 2) >> (4 * unit), word = load_pair4(block + 6 + 4 * unit);
    place_quad<5>((word & 0x0F0F0F0Fu) | spread_four(high), f);
    place_quad<5>((word >> 4 & 0x0F0F0F0Fu) | spread_four(high >> 16), f + 4);
    fit<5>(d, -16.0f, 0.0f, 0, scale, offset);
    fit<5>(d, -16.0f, 0.0f, 1, scale, offset);
  }
};

struct Q5_1 {
  enum { BLOCK = 32, BYTES = 24, UNITS = 4, DELTA = 16 };
  static FUNCTION int first(int unit) { return 4 * unit; }
  static FUNCTION void unit(const DEVICE uint8_t *block, int unit, PRIVATE float *f, PRIVATE float *scale,
                            PRIVATE float *offset) {
    const float d = half_bits_to_float(load_u16(block)), low = half_bits_to_float(load_u16(block + 2));
    const uint high = load_u32(block + 4) >> (4 * unit), word = load_u32(block + 8 + 4 * unit);
    place_quad<5>((word & 0x0F0F0F0Fu) | spread_four(high), f);
    place_quad<5>((word >> 4 & 0x0F0F0F0Fu) | spread_four(high >> 16), f + 4);
    fit<5>(d, 0.0f, low, 0, scale, offset);
    fit<5>(d, 0.0f, low, 1, scale, offset);
  }
};

struct Q8_0 {
  enum { BLOCK = 32, BYTES = 34, UNITS = 4, DELTA = 4 };
  static FUNCTION int first(int unit) { return 8 * unit; }
  static FUNCTION void unit(const DEVICE uint8_t *block, int unit, PRIVATE float *f, PRIVATE float *scale,
                            PRIVATE float *offset) {
    const float d = half_bits_to_float(load_u16(block));
    const DEVICE uint8_t *values = block + 2 + 8 * unit;
    place_quad<8>(load_pair4(values) ^ 0x80808080u, f);
    place_quad<8>(load_pair4(values + 4) ^ 0x80808080u, f + 4);
    fit<8>(d, -128.0f, 0.0f, 0, scale, offset);
    fit<8>(d, -128.0f, 0.0f, 1, scale, offset);
  }
};

struct Q8_K {
  enum { BLOCK = 256, BYTES = 292, UNITS = 32, DELTA = 4 };
  static FUNCTION int first(int unit) { return 8 * unit; }
  static FUNCTION void unit(const DEVICE uint8_t *block, int unit, PRIVATE float *f, PRIVATE float *scale,
                            PRIVATE float *offset) {
    const float d = bits_to_float(load_u32(block));
    const DEVICE uint8_t *values = block + 4 + 8 * unit;
    place_quad<8>(load_u32(values) ^ 0x80808080u, f);
    place_quad<8>(load_u32(values + 4) ^ 0x80808080u, f + 4);
    fit<8>(d, -128.0f, 0.0f, 0, scale, offset);
    fit<8>(d, -128.0f, 0.0f, 1, scale, offset);
  }
};

struct Q2_K {
  enum { BLOCK = 256, BYTES = 84, UNITS = 32, DELTA = 32 };
  static FUNCTION int first(int unit) { return 128 * (unit / 16) + 64 * (unit / 8 % 2) + 4 * (unit % 8); }
  static FUNCTION void unit(const DEVICE uint8_t *block, int unit, PRIVATE float *f, PRIVATE float *scale,
                            PRIVATE float *offset) {
    const int half = unit / 16, pair = unit / 8 % 2, at = 4 * (unit % 8);
    const float d = half_bits_to_float(load_u16(block + 80)), low = half_bits_to_float(load_u16(block + 82));
    const uint word = load_u32(block + 16 + 32 * half + at) >> (4 * pair);
    place_quad<2>(word & 0x03030303u, f);
    place_quad<2>(word >> 2 & 0x03030303u, f + 4);
    const DEVICE uint8_t *scales = block + 8 * half + 4 * pair + at / 16;
    const uint a = scales[0], b = scales[2];
    fit<2>(d * float(a & 15u), 0.0f, -low * float(a >> 4), 0, scale, offset);
    fit<2>(d * float(b & 15u), 0.0f, -low * float(b >> 4), 1, scale, offset);
  }
};

struct Q3_K {
  enum { BLOCK = 256, BYTES = 110, UNITS = 32, DELTA = 32 };
  static FUNCTION int first(int unit) { return 128 * (unit / 16) + 64 * (unit / 8 % 2) + 4 * (unit % 8); }
  static FUNCTION float scale_of(const DEVICE uint8_t *scales, int i) {
    const uint low = uint(scales[i % 8]) >> (4 * (i / 8)) & 15u, high = uint(scales[8 + i % 4]) >> (2 * (i / 4)) & 3u;
    return float(int(low | high << 4) - 32);
  }
  static FUNCTION void unit(const DEVICE uint8_t *block, int unit, PRIVATE float *f, PRIVATE float *scale,
                            PRIVATE float *offset) {
    const int half = unit / 16, pair = unit / 8 % 2, at = 4 * (unit % 8);
    const float d = half_bits_to_float(load_u16(block + 108));
    const uint word = load_pair4(block + 32 + 32 * half + at) >> (4 * pair), high = load_pair4(block + at);
    const uint bit = 4 * half + 2 * pair;
    place_quad<3>((word & 0x03030303u) | spread_bit(high, bit, 2), f);
    place_quad<3>((word >> 2 & 0x03030303u) | spread_bit(high, bit + 1, 2), f + 4);
    const int group = 8 * half + 4 * pair + at / 16;
    fit<3>(d * scale_of(block + 96, group), -4.0f, 0.0f, 0, scale, offset);
    fit<3>(d * scale_of(block + 96, group + 2), -4.0f, 0.0f, 1, scale, offset);
  }
};

// Six-bit scale and minimum of sub-blocks 2 * chunk and the next, of q4_k and q5_k.
FUNCTION void unpack_scales(const DEVICE uint8_t *scales, int chunk, PRIVATE uint *step, PRIVATE uint *low) {
  const uint a = load_u32(scales), b = load_u32(scales + 4), c = load_u32(scales + 8);
  const uint shift = 16 * (chunk % 2);
  if (chunk < 2) {
    const uint s = a >> shift, m = b >> shift;
    step[0] = s & 63u, step[1] = s >> 8 & 63u;
    low[0] = m & 63u, low[1] = m >> 8 & 63u;
  } else {
    const uint s = c >> shift, h = a >> shift, g = b >> shift;
    step[0] = (s & 15u) | (h >> 2 & 48u), step[1] = (s >> 8 & 15u) | (h >> 10 & 48u);
    low[0] = (s >> 4 & 15u) | (g >> 2 & 48u), low[1] = (s >> 12 & 15u) | (g >> 10 & 48u);
  }
}

struct Q4_K {
  enum { BLOCK = 256, BYTES = 144, UNITS = 32, DELTA = 32 };
  static FUNCTION int first(int unit) { return 64 * (unit / 8) + 4 * (unit % 8); }
  static FUNCTION void unit(const DEVICE uint8_t *block, int unit, PRIVATE float *f, PRIVATE float *scale,
                            PRIVATE float *offset) {
    const uint both = load_u32(block), word = load_u32(block + 16 + 4 * unit);
    const float d = half_bits_to_float(both & 0xFFFFu), least = half_bits_to_float(both >> 16);
    uint step[2], low[2];
    unpack_scales(block + 4, unit / 8, step, low);
    place_quad<4>(word & 0x0F0F0F0Fu, f);
    place_quad<4>(word >> 4 & 0x0F0F0F0Fu, f + 4);
    fit<4>(d * float(step[0]), 0.0f, -least * float(low[0]), 0, scale, offset);
    fit<4>(d * float(step[1]), 0.0f, -least * float(low[1]), 1, scale, offset);
  }
};

struct Q5_K {
  enum { BLOCK = 256, BYTES = 176, UNITS = 32, DELTA = 32 };
  static FUNCTION int first(int unit) { return 64 * (unit / 8) + 4 * (unit % 8); }
  static FUNCTION void unit(const DEVICE uint8_t *block, int unit, PRIVATE float *f, PRIVATE float *scale,
                            PRIVATE float *offset) {
    const uint both = load_u32(block), word = load_u32(block + 48 + 4 * unit);
    const uint high = load_u32(block + 16 + 4 * (unit % 8));
    const float d = half_bits_to_float(both & 0xFFFFu), least = half_bits_to_float(both >> 16);
    const uint bit = 2 * (unit / 8);
    uint step[2], low[2];
    unpack_scales(block + 4, unit / 8, step, low);
    place_quad<5>((word & 0x0F0F0F0Fu) | spread_bit(high, bit, 4), f);
    place_quad<5>((word >> 4 & 0x0F0F0F0Fu) | spread_bit(high, bit + 1, 4), f + 4);
    fit<5>(d * float(step[0]), 0.0f, -least * float(low[0]), 0, scale, offset);
    fit<5>(d * float(step[1]), 0.0f, -least * float(low[1]), 1, scale, offset);
  }
};

struct Q6_K {
  enum { BLOCK = 256, BYTES = 210, UNITS = 32, DELTA = 64 };
  static FUNCTION int first(int unit) { return 128 * (unit / 16) + 4 * (unit % 16); }
  static FUNCTION void unit(const DEVICE uint8_t *block, int unit, PRIVATE float *f, PRIVATE float *scale,
                            PRIVATE float *offset) {
    const int half = unit / 16, at = 4 * (unit % 16);
    const float d = half_bits_to_float(load_u16(block + 208));
    const uint word = load_pair4(block + 64 * half + at);
    const uint high = load_pair4(block + 128 + 32 * half + at % 32) >> (2 * (at / 32));
    place_quad<6>((word & 0x0F0F0F0Fu) | (high & 0x03030303u) << 4, f);
    place_quad<6>((word >> 4 & 0x0F0F0F0Fu) | (high & 0x30303030u), f + 4);
    const DEVICE uint8_t *scales = block + 192 + 8 * half + at / 16;
    fit<6>(d * float(int(scales[0] ^ 128u) - 128), -32.0f, 0.0f, 0, scale, offset);
    fit<6>(d * float(int(scales[4] ^ 128u) - 128), -32.0f, 0.0f, 1, scale, offset);
  }
};

TABLE float IQ4_VALUES[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f,
                              1.0f,    13.0f,   25.0f,  38.0f,  53.0f,  69.0f,  89.0f,  113.0f};
TABLE float FP4_VALUES[16] = {0.0f,  1.0f,  2.0f,  3.0f,  4.0f,  6.0f,  8.0f,  12.0f,
                              -0.0f, -1.0f, -2.0f, -3.0f, -4.0f, -6.0f, -8.0f, -12.0f}; // doubled, as in ggml

FUNCTION void look_up_iq4(uint word, PRIVATE float *f) {
  for (int i = 0; i < 4; ++i) {
    f[i] = IQ4_VALUES[word >> (8 * i) & 15u];
    f[4 + i] = IQ4_VALUES[word >> (8 * i + 4) & 15u];
  }
}

struct IQ4_NL {
  enum { BLOCK = 32, BYTES = 18, UNITS = 4, DELTA = 16 };
  static FUNCTION int first(int unit) { return 4 * unit; }
  static FUNCTION void unit(const DEVICE uint8_t *block, int unit, PRIVATE float *f, PRIVATE float *scale,
                            PRIVATE float *offset) {
    look_up_iq4(load_pair4(block + 2 + 4 * unit), f);
    scale[0] = scale[1] = half_bits_to_float(load_u16(block));
    offset[0] = offset[1] = 0.0f;
  }
};

struct IQ4_XS {
  enum { BLOCK = 256, BYTES = 136, UNITS = 32, DELTA = 16 };
  static FUNCTION int first(int unit) { return 32 * (unit / 4) + 4 * (unit % 4); }
  static FUNCTION void unit(const DEVICE uint8_t *block, int unit, PRIVATE float *f, PRIVATE float *scale,
                            PRIVATE float *offset) {
    const int group = unit / 4;
    const uint low = uint(block[4 + group / 2]) >> (4 * (group % 2)) & 15u, high = load_u16(block + 2) >> (2 * group);
    look_up_iq4(load_u32(block + 8 + 4 * unit), f);
    scale[0] = scale[1] = half_bits_to_float(load_u16(block)) * float(int(low | (high & 3u) << 4) - 32);
    offset[0] = offset[1] = 0.0f;
  }
};

struct MXFP4 {
  enum { BLOCK = 32, BYTES = 17, UNITS = 4, DELTA = 16 };
  static FUNCTION int first(int unit) { return 4 * unit; }
  static FUNCTION void unit(const DEVICE uint8_t *block, int unit, PRIVATE float *f, PRIVATE float *scale,
                            PRIVATE float *offset) {
    const uint word = load_bytes4(block + 1 + 4 * unit), exponent = block[0];
    for (int i = 0; i < 4; ++i) {
      f[i] = FP4_VALUES[word >> (8 * i) & 15u];
      f[4 + i] = FP4_VALUES[word >> (8 * i + 4) & 15u];
    }
    // 2^(exponent - 128); the two smallest are subnormal
    scale[0] = scale[1] = bits_to_float(exponent > 1u ? (exponent - 1u) << 23 : 0x00200000u << exponent);
    offset[0] = offset[1] = 0.0f;
  }
};

// By the numbers that ggml gives the types.
template <int ID> struct Blocks {};
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
template <> struct Blocks<39> { typedef MXFP4 type; };
