// A 16-bit weight on its way through the threadgroup's memory, in pieces of 16 rows of 64 columns, and what meets it.
//
// A piece is chunks of 16 bytes, eight to a row. Rows that differ by one have their halves exchanged, so that eight lanes
// that read four chunks of two rows each meet no bank twice. A lane takes whole chunks: which columns meet in a product
// does not matter, as long as x comes in the same order.
typedef const DEVICE uint8_t *Bytes;
enum { PIECE_WORDS = 512 };
FUNCTION int place_chunk(int row, int chunk) { return 4 * (row * 8 + (chunk ^ (row & 1) * 4)); }

// The pieces of a SIMD-group, tile after tile: every SIMDS-th of its UNITS * SIMDS in a tile of 16 rows. STAGES of them
// have a place in its ring. A lane copies chunk lane % 8 of every fourth row. The second eight rows lie JUMP bytes further
// on than they would; `rows` is how many of MADE in a tile there are from here on, and what is beyond is not copied.
template <int ROW_BYTES, int UNITS, int SIMDS, int STAGES, int MADE, uint64_t JUMP> struct Pieces {
  Bytes from;
  int rows, unit, asked, there, place;
  GROUP uint *ring;
  FUNCTION Pieces(Bytes first, int rows_, int simd, int lane, GROUP uint *rings)
      : from(first + uint64_t(lane / 8) * ROW_BYTES + 128 * simd + lane % 8 * 16), rows(rows_ - lane / 8), unit(0), asked(0),
        there(0), place(place_chunk(lane / 8, lane % 8)), ring(rings + simd * STAGES * PIECE_WORDS) {}
  FUNCTION static int follow(int stage) { return stage + 1 < STAGES ? stage + 1 : 0; }
  FUNCTION void ask() {
    GROUP uint *to = ring + asked * PIECE_WORDS + place;
    UNROLL
    for (int i = 0; i < 4; ++i)
      if (rows > 4 * i % MADE)
        stream_words(from + uint64_t(4 * i) * ROW_BYTES + (i < 2 ? 0 : JUMP), to + 128 * i);
    seal_copies();
    asked = follow(asked);
    from += 128 * SIMDS;
    if (++unit == UNITS) {
      unit = 0;
      rows -= MADE;
      from += uint64_t(MADE) * ROW_BYTES - 128 * SIMDS * UNITS;
    }
  }
  // The next COUNT pieces, once they are there: of rows lane / 4 and 8 further on chunk lane % 4 of each half.
  template <int COUNT> FUNCTION void read(int lane, PRIVATE uint (*a)[2][2][4]) {
    await_copies<STAGES - COUNT>();
    simd_barrier();
    UNROLL
    for (int c = 0; c < COUNT; ++c) {
      UNROLL
      for (int which_half = 0; which_half < 2; ++which_half)
        UNROLL
        for (int j = 0; j < 2; ++j)
          read_words(ring + there * PIECE_WORDS + place_chunk(lane / 4 + 8 * j, 4 * which_half + lane % 4),
                     a[c][which_half][j]);
      there = follow(there);
    }
    simd_barrier();
    UNROLL
    for (int c = 0; c < COUNT; ++c)
      ask();
  }
};

template <typename A, typename B> struct Same {
  enum { VALUE = 0 };
};
template <typename A> struct Same<A, A> {
  enum { VALUE = 1 };
};

// What a lane holds of x: of N times eight rows its chunks of each unit, or of SINGLE row those of some units only: the
// eight columns of the matrix units are then for units of their own, and are added up in the end. With NORM (SINGLE), x is
// multiplied by `norm`, and by the inverse root of its mean square only after it has met the weight.
template <typename K, int UNITS, int SIMDS, int N, bool SINGLE, bool NORM> struct Held {
  enum { KEPT = SINGLE ? (UNITS + 15) / 16 * 2 : UNITS };
  uint words[KEPT][N][2][4];
  float gain[NORM ? KEPT : 1][2][8];
  int simd, lane;
  FUNCTION Held(const DEVICE float *norm, int simd_, int lane_) : simd(simd_), lane(lane_) {
    UNROLL
    for (int i = 0; i < (NORM ? int(KEPT) : 0); ++i)
      UNROLL
      for (int which_half = 0; which_half < 2; ++which_half)
        if (find_unit(i) < UNITS)
          load<8>(norm + find_column(i, which_half), gain[i][which_half]);
  }
  FUNCTION int find_unit(int i) const { return SINGLE ? lane / 4 * KEPT + i : i; }
  FUNCTION int find_column(int i, int which_half) const { // the first of eight
    return (find_unit(i) * SIMDS + simd) * 64 + 32 * which_half + lane % 4 * 8;
  }
  // The sum of the squares that this lane has seen, with NORM.
  template <typename X> FUNCTION float bring(const DEVICE X *x, int columns, int tokens) {
    float squares = 0.0f;
    UNROLL
    for (int i = 0; i < KEPT; ++i)
      UNROLL
      for (int n = 0; n < N; ++n)
        UNROLL
        for (int which_half = 0; which_half < 2; ++which_half) {
          PRIVATE uint *to = words[i][n][which_half];
          const int token = SINGLE ? 0 : 8 * n + lane / 4;
          const DEVICE X *from = x + uint64_t(token) * columns + find_column(i, which_half);
          const bool is_there = token < tokens && find_unit(i) < UNITS;
          to[0] = to[1] = to[2] = to[3] = 0u;
          if (Same<X, K>::VALUE && !NORM) { // as it is, so that nothing waits for it before it meets the weight
            if (is_there)
              load_words(reinterpret_cast<const DEVICE uint8_t *>(from), to);
          } else if (is_there) {
            float v[8];
            load<8>(from, v);
            UNROLL
            for (int k = 0; k < 8; ++k) {
              if (NORM) {
                squares += v[k] * v[k];
                v[k] *= gain[NORM ? i : 0][which_half][k];
              }
              if (k % 2)
                to[k / 2] = pack_pair<K>(v[k - 1], v[k]);
            }
          }
        }
    return squares;
  }
  // Those of unit `turn` * KEPT + i. By a mask, since compilers make branches of a choice and put products of matrices
  // into both, where not all lanes meet.
  FUNCTION void meet(int turn, int i, int n, int which_half, PRIVATE uint *b) const {
    const int other = lane / 4 ^ turn; // not negative
    const uint mask = SINGLE ? uint((other - 1) >> 31) : 0xFFFFFFFFu;
    UNROLL
    for (int k = 0; k < 4; ++k)
      b[k] = words[i][n][which_half][k] & mask;
  }
};

// Takes units turn * KEPT + i and COUNT - 1 more; the halves of a piece are summed apart.
template <typename K, int COUNT, int N, typename P, typename H>
FUNCTION void take_units(PRIVATE P &pieces, PRIVATE const H &held, int turn, int i, PRIVATE float (*part)[N][4]) {
  uint a[COUNT][2][2][4];
  pieces.template read<COUNT>(held.lane, a);
  UNROLL
  for (int c = 0; c < COUNT; ++c)
    UNROLL
    for (int which_half = 0; which_half < 2; ++which_half)
      UNROLL
      for (int n = 0; n < N; ++n) {
        uint b[4];
        held.meet(turn, i + c, n, which_half, b);
        UNROLL
        for (int k = 0; k < 4; k += 2) {
          const uint left[4] = {a[c][which_half][0][k], a[c][which_half][1][k], a[c][which_half][0][k + 1],
                                a[c][which_half][1][k + 1]};
          multiply_tile<K>(part[which_half][n], left, b + k);
        }
      }
}

// The sums of a tile by one SIMD-group: 128 of each eight rows of x as its lanes hold them, or 16 of SINGLE row.
template <bool SINGLE, int N> FUNCTION void leave_sums(PRIVATE float (*part)[N][4], GROUP float *to, int lane) {
  UNROLL
  for (int n = 0; n < N; ++n)
    UNROLL
    for (int i = 0; i < 4; ++i)
      part[0][n][i] += part[1][n][i];
  UNROLL
  for (int n = 0; n < (SINGLE ? 0 : N); ++n)
    store_shared(to + (32 * n + lane) * 4, part[0][n]);
  UNROLL
  for (int i = 0; i < (SINGLE ? 2 : 0); ++i) {
    float sum = part[0][0][2 * i] + part[0][0][2 * i + 1];
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    if (lane % 4 == 0)
      to[8 * i + lane / 4] = sum;
  }
}
// Where row `row` (below 8; 8 further on comes `find_second` later) of `token` is in them.
template <bool SINGLE> FUNCTION int find_sum(int token, int row) {
  return SINGLE ? row : (token / 8 * 32 + row * 4 + token % 8 / 2) * 4 + token % 2;
}
template <bool SINGLE> FUNCTION int find_second() { return SINGLE ? 8 : 2; }
