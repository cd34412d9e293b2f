// A few rows of x times ROWS rows of a weight by each SIMD-group of a threadgroup.
//
// A threadgroup walks over the columns, 32 runs at a time. It brings x into shared memory in the order in which the
// lanes will want it: for every unit, near and far, the four numbers of all lanes side by side. Then every lane
// multiplies one run of each of its weight rows. Scale and offset follow once per run, so the sum of x over a run's
// quads is shared by all weight rows. With NORM, x is multiplied by `norm` on the way in, and each thread sums the
// squares of what it brought.

enum { RUNS_AT_ONCE = 32, QUADS = 8, SHARED_PER_TOKEN = 1024 }; // quads of a run; numbers of x in shared memory

template <typename Q, int ROWS, int T, bool NORM, int THREADS, typename X>
FUNCTION void multiply_rows(Bytes weights, uint64_t total, PRIVATE const int *rows, const DEVICE X *x,
                            const DEVICE float *norm, int columns, int tokens, int thread_id, GROUP float *shared,
                            PRIVATE float *sums, PRIVATE float *squares) {
  const int runs = columns / 32, blocks = columns / Q::BLOCK, lane = thread_id % 32;
  for (int i = 0; i < ROWS * T; ++i)
    sums[i] = 0.0f;
  for (int t = 0; t < T; ++t)
    squares[t] = 0.0f;
  for (int base = 0; base < runs; base += RUNS_AT_ONCE) {
    const int index = base + lane, block = index / Q::RUNS, run = index % Q::RUNS;
    uint w[ROWS][Q::WORDS];
    if (index < runs) // asked for first, as it comes from furthest
      for (int r = 0; r < ROWS; ++r)
        Q::load(weights, total, uint64_t(rows[r]) * blocks + block, run, w[r]);
    barrier();
    for (int quad = thread_id / 32; quad < QUADS && index < runs; quad += THREADS / 32) {
      const int column = block * Q::BLOCK + Q::first(run) + quad / 2 * Q::STEP + quad % 2 * Q::DELTA;
      float gain[4];
      if (NORM)
        load<4>(norm + column, gain);
      for (int t = 0; t < T; ++t) {
        float v[4];
        load<4>(x + uint64_t(t < tokens ? t : tokens - 1) * columns + column, v);
        for (int i = 0; i < 4; ++i) {
          if (NORM) {
            squares[t] += v[i] * v[i];
            v[i] *= gain[i];
          }
          shared[(t * QUADS + quad) * RUNS_AT_ONCE * 4 + lane * 4 + i] = v[i];
        }
      }
    }
    barrier();
    if (index < runs) {
      float a[ROWS][T], b[ROWS][T], near_sum[T], far_sum[T];
      for (int t = 0; t < T; ++t) {
        near_sum[t] = far_sum[t] = 0.0f;
        for (int r = 0; r < ROWS; ++r)
          a[r][t] = b[r][t] = 0.0f;
      }
      UNROLL
      for (int u = 0; u < 4; ++u) {
        float f[ROWS][8];
        for (int r = 0; r < ROWS; ++r)
          Q::unit(w[r], u, f[r]);
        for (int t = 0; t < T; ++t) {
          float v[8];
          const GROUP float *from = shared + (t * QUADS + 2 * u) * RUNS_AT_ONCE * 4 + lane * 4;
          load_shared(from, v);
          load_shared(from + RUNS_AT_ONCE * 4, v + 4);
          if (Q::OFFSETS) {
            near_sum[t] += (v[0] + v[1]) + (v[2] + v[3]);
            far_sum[t] += (v[4] + v[5]) + (v[6] + v[7]);
          }
          for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < 4; ++i) {
              a[r][t] += f[r][i] * v[i];
              b[r][t] += f[r][4 + i] * v[4 + i];
            }
        }
      }
      for (int r = 0; r < ROWS; ++r) {
        float scale[2], offset[2];
        Q::scales(weights, total, uint64_t(rows[r]) * blocks + block, run, scale, offset);
        for (int t = 0; t < T; ++t) {
          sums[r * T + t] += scale[0] * a[r][t] + scale[1] * b[r][t];
          if (Q::OFFSETS)
            sums[r * T + t] += offset[0] * near_sum[t] + offset[1] * far_sum[t];
        }
      }
    }
  }
}
