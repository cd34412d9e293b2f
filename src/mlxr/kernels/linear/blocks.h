// Blocks whose values stand in a table, MLX's and plain numbers; and all types by number. See runs.h and k_blocks.h.
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
  static FUNCTION void load(Bytes base, Offset total, Offset block, int, PRIVATE uint *w) {
    load_nibbles(field<0, 16>(base, total, block), w);
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    scale[0] = scale[1] = half_at(field<16, 2>(base, total, block));
    offset[0] = offset[1] = 0.0f;
  }
};

struct IQ4_XS : IQ4 {
  enum { BLOCK = 256, RUNS = 8, DELTA = 16 };
  static FUNCTION int first(int run) { return 32 * run; }
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
    load_nibbles(field<0, 128>(base, total, block) + 16 * run, w);
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int run, PRIVATE float *scale,
                              PRIVATE float *offset) {
    Bytes both = field<132, 4>(base, total, block), lows = field<128, 4>(base, total, block);
    const uint low = uint(lows[run / 2]) >> (4 * (run % 2)) & 15u, high = load_u16(both + 2) >> (2 * run) & 3u;
    scale[0] = scale[1] = half_at(both) * float(int(low | high << 4) - 32);
    offset[0] = offset[1] = 0.0f;
  }
};

struct MXFP4 : OneRun {
  enum { STEP = 4, WORDS = 4, OFFSETS = 0 };
  static FUNCTION void pack_terms(float scale, float, PRIVATE uint *step, PRIVATE uint *low) {
    *step = pack_pair(scale, scale);
    *low = 0u;
  }
  // A nibble is a sign, two bits of an exponent and one of a fraction. Put where bf16 has its sign, the lowest two bits of
  // its exponent and the highest one of its fraction, it is a number that 2^127 brings to the one of FP4_VALUES, also
  // where the exponent is 0 and both are subnormal.
  static FUNCTION void pairs(PRIVATE const uint *w, int u, PRIVATE const uint *step, PRIVATE const uint *,
                             PRIVATE uint *out) {
    const uint halves = pick_bytes(w[u], 0u, 0x3120u); // two neighbours are as far apart as the halves of a word
    UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint bytes = halves >> (8 * i);
      const uint places[2] = {(bytes & 0x000F000Fu) * 0x1040u, (bytes & 0x00F000F0u) * 0x0104u}; // near, far
      UNROLL
      for (int side = 0; side < 2; ++side) {
        const uint doubled = multiply_pairs(places[side] & 0x81C081C0u, 0x7F007F00u, 0x80008000u);
        out[2 * side + i] = multiply_pairs(doubled, step[side], 0x80008000u);
      }
    }
  }
  static FUNCTION void load(Bytes base, Offset total, Offset block, int, PRIVATE uint *w) {
    load_words(field<0, 16>(base, total, block), w);
  }
  static FUNCTION void unit(PRIVATE const uint *w, int u, PRIVATE float *f) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
      f[i] = FP4_VALUES[w[u] >> (8 * i) & 15u];
      f[4 + i] = FP4_VALUES[w[u] >> (8 * i + 4) & 15u];
    }
  }
  static FUNCTION float scale_of(uint exponent) { // 2^(exponent - 128); the two smallest are subnormal
    return bits_to_float(exponent > 1u ? (exponent - 1u) << 23 : 0x00200000u << exponent);
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    scale[0] = scale[1] = scale_of(field<16, 1>(base, total, block)[0]);
    offset[0] = offset[1] = 0.0f;
  }
};

// A number of E4M3; f16 has the same exponents and fractions, of 2^-8 of it.
FUNCTION float float_of_e4m3(uint code) { return 256.0f * half_bits_to_float((code & 127u) << 7 | (code & 128u) << 8); }

// As MXFP4, with a scale in E4M3 for 16 columns, so near and far numbers have their own; bytes hold columns 8 apart.
template <bool FACTOR> struct NvFp4 : MXFP4 {
  enum { BLOCK = 64, RUNS = 2 };
  static FUNCTION int first(int run) { return 32 * run; }
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
    uint raw[4];
    load_words(field<0, 32>(base, total, block) + 16 * run, raw);
    UNROLL
    for (int i = 0; i < 2; ++i) {
      w[i] = (raw[i] & 0x0F0F0F0Fu) | (raw[2 + i] & 0x0F0F0F0Fu) << 4;
      w[2 + i] = (raw[i] >> 4 & 0x0F0F0F0Fu) | (raw[2 + i] & 0xF0F0F0F0u);
    }
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int run, PRIVATE float *scale,
                              PRIVATE float *offset) {
    Bytes groups = field<32, 4>(base, total, block) + 2 * run;
    const float factor = FACTOR ? bits_to_float(load_u32(field<36, 4>(base, total, block))) : 1.0f;
    UNROLL
    for (int i = 0; i < 2; ++i) { // numbers are doubled; 127 counts as zero, as in ggml
      const uint code = groups[i];
      scale[i] = code == 127u ? 0.0f : 0.5f * float_of_e4m3(code & 127u) * factor;
      offset[i] = 0.0f;
    }
  }
};

struct F8_E4M3_128 : Listed {
  enum { BLOCK = 128, RUNS = 4, DELTA = 16 };
  static FUNCTION int first(int run) { return 32 * run; }
  static FUNCTION void pairs(PRIVATE const uint *w, int u, PRIVATE const uint *step, PRIVATE const uint *low,
                             PRIVATE uint *out) {
    float f[8];
    unit(w, u, f);
    scale_pairs(f, step, low, out);
  }
  static FUNCTION void unit(PRIVATE const uint *w, int u, PRIVATE float *f) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
      f[i] = float_of_e4m3(w[u] >> (8 * i));
      f[4 + i] = float_of_e4m3(w[4 + u] >> (8 * i));
    }
  }
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
    Bytes from = field<0, 128>(base, total, block) + 32 * run;
    load_words(from, w);
    load_words(from + 16, w + 4);
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    scale[0] = scale[1] = bits_to_float(load_u32(field<128, 4>(base, total, block)));
    offset[0] = offset[1] = 0.0f;
  }
};

// What MLX calls affine: integers, and scale and bias of one or two runs in f32.
template <int R> struct Affine {
  enum { BLOCK = 32 * R, RUNS = R, DELTA = 16 };
  static FUNCTION int first(int run) { return 32 * run; }
};

template <int R> struct Affine4 : Integers<4>, Affine<R> {
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
    load_nibbles(field<0, 16 * R>(base, total, block) + 16 * run, w);
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    Bytes both = field<16 * R, 8>(base, total, block);
    fit_both<4>(bits_to_float(load_u32(both)), 0.0f, bits_to_float(load_u32(both + 4)), scale, offset);
  }
};

template <int R> struct Affine8 : Integers<8>, Affine<R> {
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
    Bytes from = field<0, 32 * R>(base, total, block) + 32 * run;
    load_words(from, w);
    load_words(from + 16, w + 4);
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    Bytes both = field<32 * R, 8>(base, total, block);
    fit_both<8>(bits_to_float(load_u32(both)), 0.0f, bits_to_float(load_u32(both + 4)), scale, offset);
  }
};

// Plain numbers of 16 bits, eight neighbours to a unit, so that neighbouring runs read neighbouring words.
struct Plain {
  enum { BLOCK = 256, RUNS = 8, DELTA = 4, STEP = 64, WORDS = 16, OFFSETS = 0 };
  static FUNCTION int first(int run) { return 8 * run; }
  static FUNCTION void load(Bytes base, Offset, Offset block, int run, PRIVATE uint *w) {
    UNROLL
    for (int u = 0; u < 4; ++u)
      load_words(base + block * 512 + 128 * u + 16 * run, w + 4 * u);
  }
  static FUNCTION void scales(Bytes, Offset, Offset, int, PRIVATE float *scale, PRIVATE float *offset) {
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
// Numbers of 32 bits, four neighbours to a quad.
struct F32 : OneRun {
  enum { STEP = 4, WORDS = 32, OFFSETS = 0 };
  static FUNCTION void load(Bytes base, Offset, Offset block, int, PRIVATE uint *w) {
    UNROLL
    for (int u = 0; u < 8; ++u)
      load_words(base + block * 128 + 16 * u, w + 4 * u);
  }
  static FUNCTION void scales(Bytes, Offset, Offset, int, PRIVATE float *scale, PRIVATE float *offset) {
    scale[0] = scale[1] = 1.0f;
    offset[0] = offset[1] = 0.0f;
  }
  static FUNCTION void unit(PRIVATE const uint *w, int u, PRIVATE float *f) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
      f[i] = bits_to_float(w[4 * u + i]);
      f[4 + i] = bits_to_float(w[16 + 4 * u + i]);
    }
  }
};

typedef NvFp4<false> NVFP4;
typedef NvFp4<true> NVFP4_SCALED;
typedef Affine4<1> AFFINE4_32;
typedef Affine4<2> AFFINE4_64;
typedef Affine8<1> AFFINE8_32;
typedef Affine8<2> AFFINE8_64;

// By the numbers of csrc/tables/types.def; kernel.py adds a line for each type, whose name is here in capitals.
template <int ID> struct Blocks {};
