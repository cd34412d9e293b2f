// Blocks of 256 numbers that come out of grids (core/grids.h): an index stands for the magnitudes of eight or four columns.
// Runs are of neighbours. Numbers v come as ZERO + v, in B bits.
//
// A type says how many bytes of a block its planes have, A, B and C, and D: 2 where d has a plane of its own. `four` gives
// columns 4 quad ... 4 quad + 3 of a run, before `signs` of the run, four bits a quad, make some of them negative; `step`
// is what v is multiplied by, in the near half of a run or in the far one.

struct GridPlanes { // of one block
  Bytes a, b, c;
  float d;
};

// Four levels of four bits, or those of two bits from bit 8 `half` on, one to a byte.
FUNCTION uint spread_fours(uint number) {
  const uint pairs = (number | number << 8) & 0x00FF00FFu;
  return (pairs | pairs << 4) & 0x0F0F0F0Fu;
}
FUNCTION uint spread_twos(uint number, int which_half) {
  const uint four = number >> (8 * which_half) & 0xFFu, pairs = (four | four << 12) & 0x000F000Fu;
  return (pairs | pairs << 6) & 0x03030303u;
}
// Bytes ZERO + v as ZERO - v where their bit is set.
template <int ZERO> FUNCTION uint negate_four(uint bytes, uint bits) {
  const uint each = (bits & 15u) * 0x00204081u & 0x01010101u;
  return (bytes ^ each * 255u) - each * uint(255 - 2 * ZERO);
}
FUNCTION float odd_number(uint bits, uint mask) { return float(2u * (bits & mask) + 1u); }

template <typename Q, int B> struct GridBlock : Integers<B> {
  enum { BLOCK = 256, RUNS = 8, DELTA = 16, ZERO = 1 << (B - 1) };
  static FUNCTION int first(int run) { return 32 * run; }
  static FUNCTION GridPlanes planes(Bytes base, Offset total, Offset block) {
    GridPlanes p;
    p.a = field<0, Q::A>(base, total, block);
    p.b = field<Q::A, Q::B>(base, total, block);
    p.c = field<Q::A + Q::B, Q::C>(base, total, block);
    p.d = Q::D ? half_at(field<Q::A + Q::B + Q::C, Q::D>(base, total, block)) : 0.0f;
    return p;
  }
  static FUNCTION uint quad(PRIVATE const GridPlanes &p, int run, int quad, uint signs) {
    return negate_four<ZERO>(Q::four(p, run, quad), signs >> (4 * quad));
  }
  static FUNCTION uint signed_bytes(uint word) { return (word + uint(128 - ZERO) * 0x01010101u) ^ 0x80808080u; }
  static FUNCTION void load(Bytes base, Offset total, Offset block, int run, PRIVATE uint *w) {
    const GridPlanes p = planes(base, total, block);
    const uint signs = Q::signs(p, run);
    UNROLL
    for (int i = 0; i < 8; ++i)
      w[i] = quad(p, run, i, signs);
  }
  static FUNCTION void scales(Bytes base, Offset total, Offset block, int run, PRIVATE float *scale,
                              PRIVATE float *offset) {
    const GridPlanes p = planes(base, total, block);
    UNROLL
    for (int side = 0; side < 2; ++side)
      fit<B>(Q::step(p, run, side), float(-ZERO), 0.0f, side, scale, offset);
  }
};

struct IQ3_S : GridBlock<IQ3_S, 5> { // indices; their ninth bits, and signs; scales of 32 columns
  enum { A = 64, B = 40, C = 4, D = 2 };
  static FUNCTION uint four(PRIVATE const GridPlanes &p, int run, int quad) {
    const uint index = uint(p.a[8 * run + quad]) | (uint(p.b[run]) >> quad & 1u) << 8;
    return 2u * spread_fours(IQ3_S_GRID[index]) + 0x11111111u;
  }
  static FUNCTION uint signs(PRIVATE const GridPlanes &p, int run) { return load_u32(p.b + 8 + 4 * run); }
  static FUNCTION float step(PRIVATE const GridPlanes &p, int run, int) {
    return p.d * odd_number(uint(p.c[run / 2]) >> (4 * (run % 2)), 15u);
  }
};

// Four times seven signs, of which the eighth follows, as an even number is set.
FUNCTION uint complete_signs(uint sevens) {
  uint signs = 0u;
  UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint seven = sevens >> (7 * i) & 127u, fold = seven ^ seven >> 4, two = fold ^ fold >> 2;
    signs |= (seven | ((two ^ two >> 1) & 1u) << 7) << (8 * i);
  }
  return signs;
}

struct IQ3_XXS : GridBlock<IQ3_XXS, 7> { // indices; sevens of signs and a scale for 32 columns each
  enum { A = 64, B = 32, C = 0, D = 2 };
  static FUNCTION uint four(PRIVATE const GridPlanes &p, int run, int quad) {
    const uint levels = spread_fours(IQ3_XXS_GRID[p.a[8 * run + quad]]);
    return 8u * levels + 0x44444444u + 2u * ((levels + 0x01010101u) >> 3 & 0x01010101u); // 4 + 8 level; the last one is 62
  }
  static FUNCTION uint signs(PRIVATE const GridPlanes &p, int run) { return complete_signs(load_u32(p.b + 4 * run)); }
  static FUNCTION float step(PRIVATE const GridPlanes &p, int run, int) {
    return 0.25f * p.d * odd_number(load_u32(p.b + 4 * run) >> 28, 15u);
  }
};

FUNCTION uint widen_twos(uint number, int which_half) { // 8, 25 and 43
  const uint levels = spread_twos(number, which_half);
  return 17u * levels + (levels >> 1 & 0x01010101u) + 0x48484848u;
}

struct IQ2_XXS : GridBlock<IQ2_XXS, 7> { // of 32 columns four indices, and sevens of signs with a scale
  enum { A = 64, B = 0, C = 0, D = 2 };
  static FUNCTION uint four(PRIVATE const GridPlanes &p, int run, int quad) {
    return widen_twos(IQ2_XXS_GRID[p.a[8 * run + quad / 2]], quad % 2);
  }
  static FUNCTION uint signs(PRIVATE const GridPlanes &p, int run) { return complete_signs(load_u32(p.a + 8 * run + 4)); }
  static FUNCTION float step(PRIVATE const GridPlanes &p, int run, int) {
    return 0.125f * p.d * odd_number(load_u32(p.a + 8 * run + 4) >> 28, 15u);
  }
};

struct IQ2_XS : GridBlock<IQ2_XS, 7> { // indices of nine bits with seven signs; scales of 16 columns
  enum { A = 64, B = 8, C = 0, D = 2 };
  static FUNCTION uint four(PRIVATE const GridPlanes &p, int run, int quad) {
    return widen_twos(IQ2_XS_GRID[load_u16(p.a + 8 * run + quad / 2 * 2) & 511u], quad % 2);
  }
  static FUNCTION uint signs(PRIVATE const GridPlanes &p, int run) {
    const uint first = load_u32(p.a + 8 * run), second = load_u32(p.a + 8 * run + 4);
    return complete_signs((first >> 9 & 127u) | (first >> 25) << 7 | (second >> 9 & 127u) << 14 | (second >> 25) << 21);
  }
  static FUNCTION float step(PRIVATE const GridPlanes &p, int run, int side) {
    return 0.125f * p.d * odd_number(uint(p.b[run]) >> (4 * side), 15u);
  }
};

struct IQ2_S : GridBlock<IQ2_S, 7> { // indices; signs; two more bits of indices, and scales of 16 columns
  enum { A = 32, B = 32, C = 16, D = 2 };
  static FUNCTION uint four(PRIVATE const GridPlanes &p, int run, int quad) {
    const uint index = uint(p.a[4 * run + quad / 2]) | (uint(p.c[run]) >> (quad / 2 * 2) & 3u) << 8;
    return widen_twos(IQ2_S_GRID[index], quad % 2);
  }
  static FUNCTION uint signs(PRIVATE const GridPlanes &p, int run) { return load_u32(p.b + 4 * run); }
  static FUNCTION float step(PRIVATE const GridPlanes &p, int run, int side) {
    return 0.125f * p.d * odd_number(uint(p.c[8 + run]) >> (4 * side), 15u);
  }
};

// -1, 0 and 1 with an eighth more, or where `is_lower` less, times eight.
FUNCTION uint widen_eighths(uint index, int which_half, bool is_lower) {
  return 8u * spread_twos(IQ1_GRID[index], which_half) + (is_lower ? 0x07070707u : 0x09090909u);
}

struct IQ1_S : GridBlock<IQ1_S, 5> { // indices; three more bits of each of four, a scale and what is added to 32 columns
  enum { A = 32, B = 16, C = 0, D = 2 };
  static FUNCTION uint four(PRIVATE const GridPlanes &p, int run, int quad) {
    const uint more = load_u16(p.b + 2 * run), index = uint(p.a[4 * run + quad / 2]) | (more >> (quad / 2 * 3) & 7u) << 8;
    return widen_eighths(index, quad % 2, more >> 15);
  }
  static FUNCTION uint signs(PRIVATE const GridPlanes &, int) { return 0u; }
  static FUNCTION float step(PRIVATE const GridPlanes &p, int run, int) {
    return 0.125f * p.d * odd_number(load_u16(p.b + 2 * run) >> 12, 7u);
  }
};

struct IQ1_M : GridBlock<IQ1_M, 5> { // indices; three more bits of each and what is added to 8 columns; scales of 16, and d
  enum { A = 32, B = 16, C = 8, D = 0 };
  static FUNCTION uint four(PRIVATE const GridPlanes &p, int run, int quad) {
    const uint more = uint(p.b[2 * run + quad / 4]) >> (quad / 2 % 2 * 4);
    return widen_eighths(uint(p.a[4 * run + quad / 2]) | (more & 7u) << 8, quad % 2, more >> 3 & 1u);
  }
  static FUNCTION uint signs(PRIVATE const GridPlanes &, int) { return 0u; }
  static FUNCTION float step(PRIVATE const GridPlanes &p, int run, int side) {
    const uint first = load_u32(p.c), second = load_u32(p.c + 4);
    const uint d = (first >> 12 & 15u) | (first >> 28) << 4 | (second >> 12 & 15u) << 8 | (second >> 28) << 12;
    const uint four = (run < 4 ? first : second) >> (16 * (run / 2 % 2)); // scales of four groups
    return 0.125f * half_bits_to_float(d) * odd_number(four >> (3 * (run % 2 * 2 + side)), 7u);
  }
};
