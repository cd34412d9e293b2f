// Products with blocks by matrices of 8 x 8, of which only whole ones can be loaded and stored.
//
// A threadgroup makes 8 ROW_SQUARES ROW_SIMDS rows of a weight times 8 TOKEN_SQUARES rows of x for each SIMD-group beside.
// It walks over the columns, a run (runs.h) at a time: its threads unpack that run of every row to f16 into its memory,
// and bring the same columns of x beside it in f32. There lie squares, one behind the other, of eight rows and one unit
// of the run each: its near quad, then its far one. What a SIMD-group multiplies is a weight times x turned, so a row of
// sums is one of the weight. While it does, the words of the next run are under way. Several threads unpack a row; each
// of them makes the scales of another run, which they give each other.

enum { UNITS = 4, SQUARE = 64 };

template <typename Q, int M, int N, int THREADS, typename X, typename Picked> struct SquareRuns {
  enum { PIECES = THREADS / M, EACH = UNITS / PIECES, ROWS_APART = THREADS / 8 };
  enum { QUADS_EACH = (8 * N + THREADS - 1) / THREADS };
  Bytes weights;
  Offset total, first_block;
  const DEVICE X *from[QUADS_EACH];
  uint w[Q::WORDS];
  float scale[2], offset[2], v[QUADS_EACH][4];
  int piece, quad;

  // `row` is that of the weight which this thread unpacks a piece of: threads row, row + M, ... share it.
  FUNCTION SquareRuns(Bytes weights_, Offset total_, int row, const DEVICE X *x, int columns,
                      PRIVATE const Picked &picked, int thread_id)
      : weights(weights_), total(total_), first_block(Offset(row) * (columns / Q::BLOCK)), piece(thread_id / M),
        quad(thread_id % 8) {
    UNROLL
    for (int i = 0; i < QUADS_EACH; ++i)
      from[i] = x + picked.row(thread_id / 8 + i * ROWS_APART) * columns;
  }
  FUNCTION void load_weights(int index, int runs) {
    Q::load(weights, total, first_block + index / Q::RUNS, index % Q::RUNS, w);
    if (index % PIECES == 0) {
      const int own = index + piece < runs ? index + piece : index;
      Q::scales(weights, total, first_block + own / Q::RUNS, own % Q::RUNS, scale, offset);
    }
  }
  FUNCTION void load_x(int index) {
    const int column = index / Q::RUNS * Q::BLOCK + Q::first(index % Q::RUNS) + quad / 2 * Q::STEP + quad % 2 * Q::DELTA;
    UNROLL
    for (int i = 0; i < QUADS_EACH; ++i)
      load<4>(from[i] + column, v[i]);
  }
  FUNCTION void put(int index, GROUP float *terms, GROUP uint *weight_words, GROUP float *rows, int thread_id) {
    const int row = thread_id % M;
    if (index % PIECES == 0) {
      const float own[4] = {scale[0], scale[1], offset[0], offset[1]};
      store_shared(terms + (piece * M + row) * 4, own);
      barrier();
    }
    float term[4];
    load_shared(terms + (index % PIECES * M + row) * 4, term);
    UNROLL
    for (int u = 0; u < UNITS; ++u)
      if (u / EACH == piece) { // the same for a SIMD-group
        float f[8];
        uint pairs[4];
        Q::unit(w, u, f);
        UNROLL
        for (int i = 0; i < 4; ++i) {
          const float s = term[i / 2], o = term[2 + i / 2];
          pairs[i] = pack_pair<f16>(f[2 * i] * s + o, f[2 * i + 1] * s + o);
        }
        store_words(weight_words + (row / 8 * UNITS + u) * (SQUARE / 2) + row % 8 * 4, pairs);
      }
    UNROLL
    for (int i = 0; i < QUADS_EACH; ++i) {
      const int t = thread_id / 8 + i * ROWS_APART;
      if (t < N)
        store_shared(rows + (t / 8 * UNITS + quad / 2) * SQUARE + t % 8 * 8 + quad % 2 * 4, v[i]);
    }
  }
};

template <typename Q, int ROW_SQUARES, int ROW_SIMDS, int TOKEN_SQUARES, int THREADS, typename X, typename Picked>
FUNCTION void multiply_squares(Bytes weights, Offset total, int row, const DEVICE X *x, int columns,
                               PRIVATE const Picked &picked, int thread_id, GROUP float *terms,
                               GROUP uint *weight_words, GROUP float *rows, PRIVATE Square<float> *sums) {
  constexpr int M = 8 * ROW_SQUARES * ROW_SIMDS, N = 8 * TOKEN_SQUARES * (THREADS / 32 / ROW_SIMDS);
  const int simd = thread_id / 32, runs = columns / 32;
  const GROUP f16 *left = reinterpret_cast<const GROUP f16 *>(weight_words) + simd % ROW_SIMDS * ROW_SQUARES * UNITS * SQUARE;
  const GROUP float *right = rows + simd / ROW_SIMDS * TOKEN_SQUARES * UNITS * SQUARE;
  SquareRuns<Q, M, N, THREADS, X, Picked> run(weights, total, row, x, columns, picked, thread_id);
  UNROLL
  for (int i = 0; i < ROW_SQUARES * TOKEN_SQUARES; ++i)
    clear_square(sums[i]);
  run.load_weights(0, runs);
  await_inputs();
  run.load_x(0);
  for (int index = 0; index < runs; ++index) {
    barrier(); // until all have multiplied the run before
    run.put(index, terms, weight_words, rows, thread_id);
    barrier();
    if (index + 1 < runs) {
      run.load_weights(index + 1, runs);
      run.load_x(index + 1);
    }
    UNROLL
    for (int u = 0; u < UNITS; ++u) {
      Square<f16> a[ROW_SQUARES];
      Square<float> b[TOKEN_SQUARES];
      UNROLL
      for (int i = 0; i < ROW_SQUARES; ++i)
        read_square(left + (i * UNITS + u) * SQUARE, a[i]);
      UNROLL
      for (int i = 0; i < TOKEN_SQUARES; ++i)
        read_turned_square(right + (i * UNITS + u) * SQUARE, b[i]);
      UNROLL
      for (int i = 0; i < ROW_SQUARES; ++i)
        UNROLL
        for (int j = 0; j < TOKEN_SQUARES; ++j)
          multiply_square(sums[i * TOKEN_SQUARES + j], a[i], b[j]);
    }
  }
  barrier(); // until all have multiplied: sums go to the same memory
}

// Which of the weight's rows row m of a threadgroup is, of `made` from `first` on: with a gate, half of the rows of a
// SIMD-group are those that gate the others, `apart` behind them.
template <int ROW_SQUARES, bool GATED> FUNCTION int find_square_row(int m, int first, int made, int apart) {
  constexpr int ALL = 8 * ROW_SQUARES, OWN = GATED ? ALL / 2 : ALL;
  const int wanted = first + m / ALL * OWN + m % OWN;
  return (wanted < made ? wanted : made - 1) + (GATED && m % ALL >= OWN ? apart : 0);
}
