// Pieces of a 16-bit weight on their way through the threadgroup's memory: 16 rows of 64 columns, in chunks of 16 bytes,
// eight to a row. Rows that differ by one have their halves exchanged, so that eight lanes that read four chunks of two
// rows each meet no bank twice. A lane takes whole chunks: which columns meet in a product does not matter, as long as
// x comes in the same order.
typedef const DEVICE uint8_t *Bytes;
enum { PIECE_WORDS = 512 };
FUNCTION int place_chunk(int row, int chunk) { return 4 * (row * 8 + (chunk ^ (row & 1) * 4)); }

// The pieces of a SIMD-group, tile after tile: every SIMDS-th of its UNITS * SIMDS in a tile of 16 rows. A lane copies
// chunk lane % 8 of every fourth row. The second eight rows lie `JUMP` bytes further on than they would; `rows` is how
// many of `MADE` in a tile there are from here on, and what is beyond is not copied.
template <int ROW_BYTES, int UNITS, int SIMDS, int STAGES, int MADE, uint64_t JUMP> struct Pieces {
  Bytes from;
  int rows, asked, unit, lane;
  GROUP uint *ring;
  FUNCTION Pieces(Bytes first, int rows_, int simd, int lane_, GROUP uint *rings)
      : from(first + uint64_t(lane_ / 8) * ROW_BYTES + 128 * simd + lane_ % 8 * 16), rows(rows_ - lane_ / 8), asked(0),
        unit(0), lane(lane_), ring(rings + simd * STAGES * PIECE_WORDS) {}
  FUNCTION void ask() {
    GROUP uint *to = ring + asked * PIECE_WORDS + place_chunk(lane / 8, lane % 8);
    UNROLL
    for (int i = 0; i < 4; ++i)
      if (rows > 4 * i % MADE)
        stream_words(from + uint64_t(4 * i) * ROW_BYTES + (i < 2 ? 0 : JUMP), to + 128 * i);
    seal_copies();
    asked = asked + 1 < STAGES ? asked + 1 : 0;
    from += 128 * SIMDS;
    if (++unit == UNITS) {
      unit = 0;
      rows -= MADE;
      from += uint64_t(MADE) * ROW_BYTES - 128 * SIMDS * UNITS;
    }
  }
};

// What a lane holds of x: of N times eight rows its chunks of each unit, or of SINGLE row those of some units only: the
// eight columns of the matrix units are then for units of their own, and are added up in the end.
template <typename K, int UNITS, int SIMDS, int N, bool SINGLE> struct Held {
  enum { KEPT = SINGLE ? (UNITS + 7) / 8 : UNITS };
  uint words[KEPT][N][2][4];
  FUNCTION static int find_unit(int i, int lane) { return SINGLE ? lane / 4 * KEPT + i : i; }
  FUNCTION static bool has(int i, int lane) { return find_unit(i, lane) < UNITS; }
  FUNCTION static int column(int i, int simd, int lane) { // the first of the lane's eight, and 32 further on
    return (find_unit(i, lane) * SIMDS + simd) * 64 + lane % 4 * 8;
  }
  FUNCTION void take(int i, int n, int half, PRIVATE const float *v) {
    UNROLL
    for (int k = 0; k < 4; ++k)
      words[i][n][half][k] = pack_pair<K>(v[2 * k], v[2 * k + 1]);
  }
  FUNCTION void skip(int i, int n) {
    UNROLL
    for (int k = 0; k < 8; ++k)
      words[i][n][k / 4][k % 4] = 0u;
  }
  template <typename X> FUNCTION void bring(const DEVICE X *x, int columns, int tokens, int simd, int lane) {
    UNROLL
    for (int i = 0; i < KEPT; ++i)
      UNROLL
      for (int n = 0; n < N; ++n) {
        const int token = SINGLE ? 0 : 8 * n + lane / 4;
        if (token >= tokens || !has(i, lane)) {
          skip(i, n);
          continue;
        }
        UNROLL
        for (int half = 0; half < 2; ++half) {
          float v[8];
          load<8>(x + uint64_t(token) * columns + column(i, simd, lane) + 32 * half, v);
          take(i, n, half, v);
        }
      }
  }
  // Those of unit `turn` * KEPT + i.
  FUNCTION void meet(int turn, int i, int n, int half, int lane, PRIVATE uint *b) const {
    UNROLL
    for (int k = 0; k < 4; ++k)
      b[k] = !SINGLE || lane / 4 == turn ? words[i][n][half][k] : 0u;
  }
};

// The same of one row of `norm` times x over the root of its mean square.
template <typename H> struct Normer {
  float gain[H::KEPT][2][8], v[H::KEPT][2][8];
  FUNCTION Normer(const DEVICE float *norm, int simd, int lane) {
    UNROLL
    for (int i = 0; i < H::KEPT; ++i)
      if (H::has(i, lane))
        UNROLL
        for (int half = 0; half < 2; ++half)
          load<8>(norm + H::column(i, simd, lane) + 32 * half, gain[i][half]);
  }
  // The sum of the squares that this lane has seen.
  template <typename X> FUNCTION float bring(const DEVICE X *x, int simd, int lane) {
    float squares = 0.0f;
    UNROLL
    for (int i = 0; i < H::KEPT; ++i)
      if (H::has(i, lane))
        UNROLL
        for (int half = 0; half < 2; ++half)
          load<8>(x + H::column(i, simd, lane) + 32 * half, v[i][half]);
    UNROLL
    for (int i = 0; i < H::KEPT; ++i)
      if (H::has(i, lane))
        UNROLL
        for (int k = 0; k < 16; ++k)
          squares += v[i][k / 8][k % 8] * v[i][k / 8][k % 8];
    return squares;
  }
  FUNCTION void finish(float factor, int lane, PRIVATE H &held) {
    UNROLL
    for (int i = 0; i < H::KEPT; ++i) {
      held.skip(i, 0);
      if (H::has(i, lane))
        UNROLL
        for (int half = 0; half < 2; ++half) {
          UNROLL
          for (int k = 0; k < 8; ++k)
            v[i][half][k] *= factor * gain[i][half][k];
          held.take(i, 0, half, v[i][half]);
        }
    }
  }
};
