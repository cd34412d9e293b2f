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
  static FUNCTION GridPlanes planes(Bytes base, uint64_t total, uint64_t block) {
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
  static FUNCTION void load(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE uint *w) {
    const GridPlanes p = planes(base, total, block);
    const uint signs = Q::signs(p, run);
    UNROLL
    for (int i = 0; i < 8; ++i)
      w[i] = quad(p, run, i, signs);
  }
  static FUNCTION void scales(Bytes base, uint64_t total, uint64_t block, int run, PRIVATE float *scale,
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
