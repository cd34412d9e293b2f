// Pieces of a 16-bit weight on their way through the threadgroup's memory: 16 rows of 64 columns, in chunks of 16 bytes,
// eight to a row. Rows that differ by one have their halves exchanged, so that eight lanes that read four chunks of two
// rows each meet no bank twice. A lane takes whole chunks: which columns meet in a product does not matter, as long as
// x comes in the same order.
typedef const DEVICE uint8_t *Bytes;
enum { PIECE_WORDS = 512 };
FUNCTION int place_chunk(int row, int chunk) { return 4 * (row * 8 + (chunk ^ (row & 1) * 4)); }

// The ring of a SIMD-group: STAGES pieces, of which `asked` is the next to be asked for, and `there` the next to come.
template <int STAGES> struct Ring {
  GROUP uint *pieces;
  int asked, there;
  FUNCTION Ring(GROUP uint *rings, int simd) : pieces(rings + simd * STAGES * PIECE_WORDS), asked(0), there(0) {}
  FUNCTION static int follow(int piece) { return piece + 1 < STAGES ? piece + 1 : 0; }
  // A piece of `own`, or when those have all been asked for, one of what comes `after`.
  template <typename Own, typename After> FUNCTION void ask(PRIVATE Own &own, PRIVATE After &after) {
    if (own.left)
      own.copy(pieces + asked * PIECE_WORDS);
    else
      after.copy(pieces + asked * PIECE_WORDS);
    seal_copies();
    asked = follow(asked);
  }
};
struct Nothing {
  FUNCTION void copy(GROUP uint *) {}
};
// `first`, then `rest`.
template <typename First, typename Rest> struct Then {
  PRIVATE First &first;
  PRIVATE Rest &rest;
  FUNCTION void copy(GROUP uint *to) {
    if (first.left)
      first.copy(to);
    else
      rest.copy(to);
  }
};

// The pieces of a SIMD-group, tile after tile: every SIMDS-th of its UNITS * SIMDS in a tile of 16 rows. A lane copies
// chunk lane % 8 of every fourth row. The second eight rows lie JUMP bytes further on than they would; `rows` is how
// many of MADE in a tile there are from here on, and what is beyond is not copied.
template <int ROW_BYTES, int UNITS, int SIMDS, int MADE, uint64_t JUMP> struct Pieces {
  Bytes from;
  int rows, left, unit, place;
  FUNCTION Pieces(Bytes first, int rows_, int simd, int lane)
      : from(first + uint64_t(lane / 8) * ROW_BYTES + 128 * simd + lane % 8 * 16), rows(rows_ - lane / 8),
        left((rows_ + MADE - 1) / MADE * UNITS), unit(0), place(place_chunk(lane / 8, lane % 8)) {}
  FUNCTION void copy(GROUP uint *to) {
    if (!left)
      return;
    UNROLL
    for (int i = 0; i < 4; ++i)
      if (rows > 4 * i % MADE)
        stream_words(from + uint64_t(4 * i) * ROW_BYTES + (i < 2 ? 0 : JUMP), to + place + 128 * i);
    --left;
    from += 128 * SIMDS;
    if (++unit == UNITS) {
      unit = 0;
      rows -= MADE;
      from += uint64_t(MADE) * ROW_BYTES - 128 * SIMDS * UNITS;
    }
  }
};

// What a lane holds of x: of N times eight rows its chunks of each unit, or of SINGLE row those of some units only: the
// eight columns of the matrix units are then for units of their own, and are added up in the end. With NORM, it is
// multiplied by `norm`, and by the inverse root of its mean square only after it is multiplied.
template <typename A, typename B> struct Same {
  enum { VALUE = 0 };
};
template <typename A> struct Same<A, A> {
  enum { VALUE = 1 };
};
template <typename K, int UNITS, int SIMDS, int N, bool SINGLE, bool NORM> struct Held {
  enum { KEPT = SINGLE ? (UNITS + 15) / 16 * 2 : UNITS };
  uint words[KEPT][N][2][4];
  float gain[KEPT][2][8], squares[N]; // of row lane / 4 of each eight, as far as this lane has seen it
  int simd, lane;
  FUNCTION Held(const DEVICE float *norm, int simd_, int lane_) : simd(simd_), lane(lane_) {
    UNROLL
    for (int n = 0; n < N; ++n)
      squares[n] = 0.0f;
    if (SINGLE && NORM) // as long as x is not there
      UNROLL
      for (int i = 0; i < KEPT; ++i)
        load_gain(norm, i);
  }
  FUNCTION int find_unit(int i) const { return SINGLE ? lane / 4 * KEPT + i : i; }
  FUNCTION int find_column(int i, int half) const { // the first of eight
    return (find_unit(i) * SIMDS + simd) * 64 + 32 * half + lane % 4 * 8;
  }
  FUNCTION void load_gain(const DEVICE float *norm, int i) {
    UNROLL
    for (int half = 0; half < 2; ++half)
      if (find_unit(i) < UNITS)
        load<8>(norm + find_column(i, half), gain[i][half]);
  }
  template <typename X> FUNCTION void bring(const DEVICE X *x, const DEVICE float *norm, int columns, int tokens) {
    UNROLL
    for (int i = 0; i < KEPT; ++i) {
      if (NORM && !SINGLE)
        load_gain(norm, i);
      UNROLL
      for (int n = 0; n < N; ++n)
        UNROLL
        for (int half = 0; half < 2; ++half) {
          PRIVATE uint *to = words[i][n][half];
          const int token = SINGLE ? 0 : 8 * n + lane / 4;
          const DEVICE X *from = x + uint64_t(token) * columns + find_column(i, half);
          const bool is_there = token < tokens && find_unit(i) < UNITS;
          to[0] = to[1] = to[2] = to[3] = 0u;
          if (Same<X, K>::VALUE && !NORM) { // as it is, so that nothing waits for it before it is multiplied
            if (is_there)
              load_words(reinterpret_cast<const DEVICE uint8_t *>(from), to);
          } else if (is_there) {
            float v[8];
            load<8>(from, v);
            UNROLL
            for (int k = 0; k < 8; ++k) {
              if (NORM) {
                squares[n] += v[k] * v[k];
                v[k] *= gain[i][half][k];
              }
              if (k % 2)
                to[k / 2] = pack_pair<K>(v[k - 1], v[k]);
            }
          }
        }
    }
  }
  // Leaves for each row what this SIMD-group has seen of its squares.
  FUNCTION void tell_squares(GROUP float *to) const {
    UNROLL
    for (int n = 0; n < N; ++n) {
      float sum = squares[n];
      sum += shuffle_xor(sum, 1);
      sum += shuffle_xor(sum, 2);
      if (SINGLE) {
        sum += shuffle_xor(sum, 4);
        sum += shuffle_xor(sum, 8);
        sum += shuffle_xor(sum, 16);
      }
      if (lane % 4 == 0)
        to[8 * n + lane / 4] = sum;
    }
  }
  // Those of unit `turn` * KEPT + i. By a mask, since compilers make branches of a choice and put products of matrices
  // into both, where not all lanes meet.
  FUNCTION void meet(int turn, int i, int n, int half, PRIVATE uint *b) const {
    const int other = lane / 4 ^ turn; // below 8
    const uint mask = SINGLE ? uint((other - 1) >> 31) : 0xFFFFFFFFu;
    UNROLL
    for (int k = 0; k < 4; ++k)
      b[k] = words[i][n][half][k] & mask;
  }
};

// One product; see floats.body for what it computes.
template <typename X, typename K, typename Y, int ROWS, int INPUTS, int GROUPS, int SHARES, int STAGES, int SIMDS, int N,
          bool SINGLE, bool NORM, bool BIAS, int GATE, bool RESIDUAL>
struct FloatProduct {
  enum { INNER = INPUTS / SHARES, UNITS = INNER / (64 * SIMDS), ROW_BYTES = 2 * INPUTS, MADE = GATE ? 8 : 16 };
  enum { COLUMNS = GATE ? ROWS / 2 : ROWS, TOKENS = SINGLE ? 1 : 8 * N, KEPT = SINGLE ? 16 : 128 * N };
  typedef Pieces<ROW_BYTES, UNITS, SIMDS, MADE, (GATE ? uint64_t(COLUMNS - 8) * ROW_BYTES : 0)> P;
  typedef Held<K, UNITS, SIMDS, N, SINGLE, NORM> H;
  int share, first, end, thread, simd, lane;
  P pieces;
  FUNCTION FloatProduct(const DEVICE K *weights, int group_, int thread_)
      : share(group_ % SHARES), first(int(uint64_t(COLUMNS) * (group_ / SHARES) / GROUPS)),
        end(int(uint64_t(COLUMNS) * (group_ / SHARES + 1) / GROUPS)), thread(thread_), simd(thread_ / 32),
        lane(thread_ % 32),
        pieces(reinterpret_cast<Bytes>(weights) + uint64_t(first) * ROW_BYTES + share * (2 * INNER), end - first,
               thread_ / 32, thread_ % 32) {}
  // Takes COUNT neighbouring units.
  template <int COUNT, typename After>
  FUNCTION void take(PRIVATE Ring<STAGES> &ring, PRIVATE After &after, PRIVATE const H &held, int turn, int i,
                     PRIVATE float (*part)[N][4]) {
    uint a[COUNT][2][2][4];
    await_copies<STAGES - COUNT>();
    simd_barrier();
    UNROLL
    for (int c = 0; c < COUNT; ++c) {
      const GROUP uint *piece = ring.pieces + ring.there * PIECE_WORDS;
      UNROLL
      for (int half = 0; half < 2; ++half)
        UNROLL
        for (int j = 0; j < 2; ++j)
          read_words(piece + place_chunk(lane / 4 + 8 * j, 4 * half + lane % 4), a[c][half][j]);
      ring.there = Ring<STAGES>::follow(ring.there);
    }
    simd_barrier();
    UNROLL
    for (int c = 0; c < COUNT; ++c)
      ring.ask(pieces, after);
    UNROLL
    for (int c = 0; c < COUNT; ++c)
      UNROLL
      for (int half = 0; half < 2; ++half)
        UNROLL
        for (int n = 0; n < N; ++n) {
          uint b[4];
          held.meet(turn, i + c, n, half, b);
          UNROLL
          for (int k = 0; k < 4; k += 2) {
            const uint left[4] = {a[c][half][0][k], a[c][half][1][k], a[c][half][0][k + 1], a[c][half][1][k + 1]};
            multiply_tile<K>(part[half][n], left, b + k);
          }
        }
  }
  // Sums of a tile by this SIMD-group.
  FUNCTION void leave(PRIVATE float (*part)[N][4], GROUP float *to) const {
    UNROLL
    for (int n = 0; n < N; ++n)
      UNROLL
      for (int i = 0; i < 4; ++i)
        part[0][n][i] += part[1][n][i];
    if (SINGLE) {
      UNROLL
      for (int i = 0; i < 2; ++i) {
        float sum = part[0][0][2 * i] + part[0][0][2 * i + 1];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        if (lane % 4 == 0)
          to[8 * i + lane / 4] = sum;
      }
    } else {
      UNROLL
      for (int n = 0; n < N; ++n)
        store_shared(to + (32 * n + lane) * 4, part[0][n]);
    }
  }
  // `room` has 2 * SIMDS * KEPT numbers, `squares` SIMDS * 8 * N. The ring has been asked for the first STAGES pieces.
  template <typename After>
  FUNCTION void run(PRIVATE Ring<STAGES> &ring, PRIVATE After &after, PRIVATE H &held, const DEVICE X *x,
                    const DEVICE float *bias, const DEVICE float *norm, const DEVICE float *residual, float eps,
                    int tokens, DEVICE Y *out, GROUP float *room, GROUP float *squares) {
    held.bring(x + share * INNER, norm, INPUTS, tokens);
    if (NORM)
      held.tell_squares(squares + simd * 8 * N);
    // a thread finishes one number of each tile
    const int token = SINGLE ? 0 : thread / MADE, row = thread % MADE, tiles = (end - first + MADE - 1) / MADE;
    const bool finishes = thread < MADE * TOKENS && token < tokens;
    const int place = SINGLE ? row : ((token / 8 * 32 + row % 8 * 4 + token % 8 / 2) * 4 + row / 8 * 2 + token % 2);
    float factor = 1.0f;
    for (int tile = 0; tile < tiles; ++tile) {
      const int column = first + tile * MADE + row;
      const bool finishes_this = finishes && column < end;
      const uint64_t at = uint64_t(share * tokens + token) * COLUMNS + column;
      const float added = RESIDUAL && finishes_this ? float(residual[at]) : 0.0f; // asked for early
      float part[2][N][4];
      UNROLL
      for (int i = 0; i < 8 * N; ++i)
        part[i / (4 * N)][i / 4 % N][i % 4] = 0.0f;
      for (int turn = 0; turn * H::KEPT < UNITS; ++turn)
        UNROLL
        for (int i = 0; i < H::KEPT; i += 2) {
          const int rest = UNITS - turn * H::KEPT - i;
          if (i + 1 < H::KEPT && rest > 1)
            take<2>(ring, after, held, turn, i, part);
          else if (rest > 0)
            take<1>(ring, after, held, turn, i, part);
        }
      GROUP float *all = room + tile % 2 * SIMDS * KEPT;
      leave(part, all + simd * KEPT);
      barrier();
      if (finishes_this) {
        float sum = 0.0f, up = 0.0f;
        UNROLL
        for (int s = 0; s < SIMDS; ++s) {
          sum += all[s * KEPT + place];
          if (GATE)
            up += all[s * KEPT + place + (SINGLE ? 8 : 2)];
        }
        if (NORM && tile == 0) {
          float square = 0.0f;
          UNROLL
          for (int s = 0; s < SIMDS; ++s)
            square += squares[s * 8 * N + token];
          factor = rsqrt_of(square / float(INPUTS) + eps);
        }
        sum *= factor;
        if (BIAS)
          sum += bias[column];
        if (GATE)
          sum = gate_with<GATE>(sum, up * factor + (BIAS ? bias[COLUMNS + column] : 0.0f));
        out[at] = Y(RESIDUAL ? sum + added : sum);
      }
    }
  }
};
