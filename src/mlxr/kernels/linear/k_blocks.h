// Blocks of 256 values, with small integers for scales. See runs.h.
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
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
    split(field<0, 64>(base, total, block), run, w);
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int run, PRIVATE float *scale,
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
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
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
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int run, PRIVATE float *scale,
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
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
    load_nibbles(field<0, 144>(base, total, block) + 16 + 16 * run, w);
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int run, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_sixes<4>(field<0, 144>(base, total, block), run / 2, scale, offset);
  }
};

struct Q5_K : Integers<5>, Chunks {
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
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
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int run, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_sixes<5>(field<0, 176>(base, total, block), run / 2, scale, offset);
  }
};

struct Q6_K : Integers<6> {
  enum { BLOCK = 256, RUNS = 8, DELTA = 64 };
  static FUNCTION int first(int run) { return 128 * (run / 4) + 16 * (run % 4); }
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
    const int which_half = run / 4, quarter = run % 4;
    uint high[4];
    load_words(field<128, 64>(base, total, block) + 32 * which_half + 16 * (quarter % 2), high);
    load_nibbles(field<0, 128>(base, total, block) + 64 * which_half + 16 * quarter, w);
    UNROLL
    for (int u = 0; u < 4; ++u) {
      const uint word = high[u] >> (2 * (quarter / 2));
      w[u] |= (word & 0x03030303u) << 4;
      w[4 + u] |= word & 0x30303030u;
    }
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int run, PRIVATE float *scale,
                              PRIVATE float *offset) {
    const float d = half_at(field<208, 2>(base, total, block));
    Bytes groups = field<192, 16>(base, total, block) + 8 * (run / 4) + run % 4;
    fit<6>(d * float(int(groups[0] ^ 128u) - 128), -32.0f, 0.0f, 0, scale, offset);
    fit<6>(d * float(int(groups[4] ^ 128u) - 128), -32.0f, 0.0f, 1, scale, offset);
  }
};

struct TQ2_0 : Integers<2>, Twos {
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
    split(field<0, 64>(base, total, block), run, w);
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_both<2>(half_at(field<64, 2>(base, total, block)), -1.0f, 0.0f, scale, offset);
  }
};

// Digit `index` of base 3 of four bytes, five of which each has.
FUNCTION uint take_digit(uint bytes, int index) {
  const uint power = index == 0 ? 1u : index == 1 ? 3u : index == 2 ? 9u : index == 3 ? 27u : 81u;
  const uint even = (bytes & 0x00FF00FFu) * power & 0x00FF00FFu, odd = (bytes >> 8 & 0x00FF00FFu) * power & 0x00FF00FFu;
  return (3u * even >> 8 & 0x00FF00FFu) | (3u * odd & 0xFF00FF00u);
}

struct TQ1_0 : Integers<2> { // digits of 32 bytes, then of 16; the last 16 numbers are those of four bytes
  enum { BLOCK = 256, RUNS = 8, DELTA = 16 };
  static FUNCTION int first(int run) { return 32 * run; }
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
    Bytes digits = field<0, 48>(base, total, block);
    const uint last = load_u32(field<48, 4>(base, total, block));
    UNROLL
    for (int i = 0; i < 8; ++i) {
      const uint word = load_u32(digits + (run < 5 ? 4 * i : 32 + 4 * (i % 4)));
      w[i] = run == 7 && i >= 4 ? take_digit(last, i - 4) : take_digit(word, run < 5 ? run : 2 * (run - 5) + i / 4);
    }
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_both<2>(half_at(field<52, 2>(base, total, block)), -1.0f, 0.0f, scale, offset);
  }
};

// Numbers of two bits less one, BYTES of them in a block, in the order of the columns.
template <int BYTES> struct TwosInOrder : Integers<2> {
  enum { BLOCK = 4 * BYTES, RUNS = BYTES / 8, DELTA = 16 };
  static FUNCTION int first(int run) { return 32 * run; }
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
    UNROLL
    for (int i = 0; i < 8; ++i) {
      const uint four = field<0, BYTES>(base, total, block)[8 * run + i];
      w[i] = (four & 3u) | (four & 12u) << 6 | (four & 48u) << 12 | (four & 192u) << 18;
    }
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_both<2>(half_at(field<BYTES, 2>(base, total, block)), -1.0f, 0.0f, scale, offset);
  }
};
typedef TwosInOrder<16> Q2_0;
typedef TwosInOrder<32> PQ2_0;

struct Q1_0 : Integers<2> { // bits, as 0 and 2
  enum { BLOCK = 128, RUNS = 4, DELTA = 16 };
  static FUNCTION int first(int run) { return 32 * run; }
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
    UNROLL
    for (int i = 0; i < 8; ++i) {
      const uint four = uint(field<0, 16>(base, total, block)[4 * run + i / 2]) >> (4 * (i % 2));
      w[i] = (four & 1u) << 1 | (four & 2u) << 8 | (four & 4u) << 15 | (four & 8u) << 22;
    }
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_both<2>(half_at(field<16, 2>(base, total, block)), -1.0f, 0.0f, scale, offset);
  }
};

struct PTQ1_0 : Integers<2> { // as TQ1_0: digits of 16 bytes, then of 8; the last 8 numbers are those of two bytes
  enum { BLOCK = 128, RUNS = 4, DELTA = 16 };
  static FUNCTION int first(int run) { return 32 * run; }
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
    Bytes digits = field<0, 24>(base, total, block);
    const uint last = load_u16(field<24, 4>(base, total, block)) * 0x10001u;
    UNROLL
    for (int i = 0; i < 8; ++i) {
      const int four = 8 * run + i, late = four - 20;
      const uint word = load_u32(digits + (late < 0 ? 4 * (four % 4) : 16 + 4 * (late & 1)));
      w[i] = take_digit(word, late < 0 ? four / 4 : late / 2);
      if (late >= 10)
        w[i] = (take_digit(last, 2 * late - 20) & 0xFFFFu) | (take_digit(last, 2 * late - 19) & 0xFFFF0000u);
    }
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int, PRIVATE float *scale,
                              PRIVATE float *offset) {
    fit_both<2>(half_at(field<24, 4>(base, total, block) + 2), -1.0f, 0.0f, scale, offset);
  }
};
