// A few rows of x times ROWS rows of a weight by each SIMD-group of a threadgroup.
//
// A threadgroup walks over the columns, 32 runs at a time. It brings x into shared memory in the order in which the
// lanes will want it: for every unit, near and far, the four numbers of all lanes side by side. Then every lane
// multiplies one run of each of its weight rows. Scale and offset follow once per run, so the sum of x over a run's
// quads is shared by all weight rows. With NORM, x is multiplied by `norm` on the way in, and each thread sums the
// squares of what it brought. A threadgroup has as many SIMD-groups as a run has quads, each brings one.
//
// `multiply_alone` does the same without shared memory and so without barriers: each SIMD-group reads x by itself, from a
// cache. A lane adds in the same order.

enum { RUNS_AT_ONCE = 32, QUADS = 8, SHARED_PER_TOKEN = 1024 }; // quads of a run; numbers of x in shared memory

// Which row of x is token t, of so many that follow one another; others may stand in its place.
struct NextRows {
  int tokens;
  FUNCTION Offset row(int t) const { return Offset(t < tokens ? t : tokens - 1); }
};

template <typename Q, int ROWS, int T, bool NORM, typename X, typename Picked>
FUNCTION void multiply_rows(Bytes weights, Offset total, PRIVATE const int *rows, const DEVICE X *x,
                            const DEVICE float *norm, int columns, PRIVATE const Picked &picked, int thread_id,
                            GROUP float *shared, PRIVATE float *sums, PRIVATE float *squares) {
  const int runs = columns / 32, blocks = columns / Q::BLOCK, lane = thread_id % 32;
  UNROLL
  for (int i = 0; i < ROWS * T; ++i)
    sums[i] = 0.0f;
  UNROLL
  for (int t = 0; t < T; ++t)
    squares[t] = 0.0f;
  for (int base = 0; base < runs; base += RUNS_AT_ONCE) {
    const int index = base + lane, block = index / Q::RUNS, run = index % Q::RUNS;
    uint w[ROWS][Q::WORDS];
    float scale[ROWS][2], offset[ROWS][2], v[T][4];
    // everything that comes from far is asked for before anything waits
    const int quad = thread_id / 32;
    if (index < runs) {
      UNROLL
      for (int r = 0; r < ROWS; ++r) {
        Q::load(weights, total, Offset(rows[r]) * blocks + block, run, w[r]);
        Q::scales(weights, total, Offset(rows[r]) * blocks + block, run, scale[r], offset[r]);
      }
    }
    if (base == 0)
      await_inputs();
    if (index < runs) {
      const int column = block * Q::BLOCK + Q::first(run) + quad / 2 * Q::STEP + quad % 2 * Q::DELTA;
      float gain[4];
      if (NORM)
        load<4>(norm + column, gain);
      UNROLL
      for (int t = 0; t < T; ++t) {
        load<4>(x + picked.row(t) * columns + column, v[t]);
        UNROLL
        for (int i = 0; i < 4; ++i)
          if (NORM) {
            squares[t] += v[t][i] * v[t][i];
            v[t][i] *= gain[i];
          }
      }
    }
    barrier();
    if (index < runs)
      for (int t = 0; t < T; ++t)
        store_shared(shared + (t * QUADS + quad) * RUNS_AT_ONCE * 4 + lane * 4, v[t]);
    barrier();
    if (index < runs) {
      float a[ROWS][T], b[ROWS][T], near_sum[T], far_sum[T];
      UNROLL
      for (int t = 0; t < T; ++t) {
        near_sum[t] = far_sum[t] = 0.0f;
        UNROLL
        for (int r = 0; r < ROWS; ++r)
          a[r][t] = b[r][t] = 0.0f;
      }
      UNROLL
      for (int u = 0; u < 4; ++u) {
        float f[ROWS][8];
        UNROLL
        for (int r = 0; r < ROWS; ++r)
          Q::unit(w[r], u, f[r]);
        UNROLL
        for (int t = 0; t < T; ++t) {
          float x8[8];
          const GROUP float *from = shared + (t * QUADS + 2 * u) * RUNS_AT_ONCE * 4 + lane * 4;
          load_shared(from, x8);
          load_shared(from + RUNS_AT_ONCE * 4, x8 + 4);
          if (Q::OFFSETS) {
            near_sum[t] += (x8[0] + x8[1]) + (x8[2] + x8[3]);
            far_sum[t] += (x8[4] + x8[5]) + (x8[6] + x8[7]);
          }
          UNROLL
          for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < 4; ++i) {
              a[r][t] += f[r][i] * x8[i];
              b[r][t] += f[r][4 + i] * x8[4 + i];
            }
        }
      }
      UNROLL
      for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < T; ++t) {
          sums[r * T + t] += scale[r][0] * a[r][t] + scale[r][1] * b[r][t];
          if (Q::OFFSETS)
            sums[r * T + t] += offset[r][0] * near_sum[t] + offset[r][1] * far_sum[t];
        }
    }
  }
}

template <typename Q, int ROWS, int T, bool NORM, typename X, typename Picked>
FUNCTION void multiply_alone(Bytes weights, Offset total, PRIVATE const int *rows, const DEVICE X *x,
                             const DEVICE float *norm, int columns, PRIVATE const Picked &picked, int lane,
                             PRIVATE float *sums, PRIVATE float *squares) {
  const int runs = columns / 32, blocks = columns / Q::BLOCK;
  UNROLL
  for (int i = 0; i < ROWS * T; ++i)
    sums[i] = 0.0f;
  UNROLL
  for (int t = 0; t < T; ++t)
    squares[t] = 0.0f;
  await_inputs();
  for (int index = lane; index < runs; index += RUNS_AT_ONCE) {
    const int block = index / Q::RUNS, run = index % Q::RUNS;
    uint w[ROWS][Q::WORDS];
    float scale[ROWS][2], offset[ROWS][2], a[ROWS][T], b[ROWS][T], near_sum[T], far_sum[T];
    UNROLL
    for (int r = 0; r < ROWS; ++r) {
      Q::load(weights, total, Offset(rows[r]) * blocks + block, run, w[r]);
      Q::scales(weights, total, Offset(rows[r]) * blocks + block, run, scale[r], offset[r]);
      UNROLL
      for (int t = 0; t < T; ++t)
        a[r][t] = b[r][t] = 0.0f;
    }
    UNROLL
    for (int t = 0; t < T; ++t)
      near_sum[t] = far_sum[t] = 0.0f;
    UNROLL
    for (int u = 0; u < 4; ++u) {
      const int column = block * Q::BLOCK + Q::first(run) + u * Q::STEP;
      float gain[8], x8[T][8];
      if (NORM) {
        load<4>(norm + column, gain);
        load<4>(norm + column + Q::DELTA, gain + 4);
      }
      UNROLL
      for (int t = 0; t < T; ++t) {
        load<4>(x + picked.row(t) * columns + column, x8[t]);
        load<4>(x + picked.row(t) * columns + column + Q::DELTA, x8[t] + 4);
        if (NORM) {
          UNROLL
          for (int i = 0; i < 8; ++i) {
            squares[t] += x8[t][i] * x8[t][i];
            x8[t][i] *= gain[i];
          }
        }
        if (Q::OFFSETS) {
          near_sum[t] += (x8[t][0] + x8[t][1]) + (x8[t][2] + x8[t][3]);
          far_sum[t] += (x8[t][4] + x8[t][5]) + (x8[t][6] + x8[t][7]);
        }
      }
      UNROLL
      for (int r = 0; r < ROWS; ++r) {
        float f[8];
        Q::unit(w[r], u, f);
        UNROLL
        for (int t = 0; t < T; ++t)
          for (int i = 0; i < 4; ++i) {
            a[r][t] += f[i] * x8[t][i];
            b[r][t] += f[4 + i] * x8[t][4 + i];
          }
      }
    }
    UNROLL
    for (int r = 0; r < ROWS; ++r)
      for (int t = 0; t < T; ++t) {
        sums[r * T + t] += scale[r][0] * a[r][t] + scale[r][1] * b[r][t];
        if (Q::OFFSETS)
          sums[r * T + t] += offset[r][0] * near_sum[t] + offset[r][1] * far_sum[t];
      }
  }
}

// Which of the two ways it goes.
template <bool ALONE, typename Q, int ROWS, int T, bool NORM> struct RowsWay {
  template <typename X, typename Picked>
  static FUNCTION void multiply(Bytes weights, Offset total, PRIVATE const int *rows, const DEVICE X *x,
                                const DEVICE float *norm, int columns, PRIVATE const Picked &picked, int thread_id,
                                GROUP float *shared, PRIVATE float *sums, PRIVATE float *squares) {
    multiply_rows<Q, ROWS, T, NORM>(weights, total, rows, x, norm, columns, picked, thread_id, shared, sums, squares);
  }
};
template <typename Q, int ROWS, int T, bool NORM> struct RowsWay<true, Q, ROWS, T, NORM> {
  template <typename X, typename Picked>
  static FUNCTION void multiply(Bytes weights, Offset total, PRIVATE const int *rows, const DEVICE X *x,
                                const DEVICE float *norm, int columns, PRIVATE const Picked &picked, int thread_id,
                                GROUP float *, PRIVATE float *sums, PRIVATE float *squares) {
    multiply_alone<Q, ROWS, T, NORM>(weights, total, rows, x, norm, columns, picked, thread_id % 32, sums, squares);
  }
};
