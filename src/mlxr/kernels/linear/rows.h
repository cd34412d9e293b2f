// A few rows of x times ROWS rows of a weight, by one SIMD-group.
//
// Lanes take the runs of a row in turn. A run's numbers are multiplied as they come; scale and offset follow once, so
// the sum of x over a run's quads is shared by all weight rows. With NORM, x is multiplied by `norm` on the way and the
// sums of its squares come out as well.

template <typename Q, int ROWS, int T, bool NORM, typename X>
FUNCTION void multiply_rows(Bytes weights, uint64_t total, PRIVATE const int *rows, const DEVICE X *x,
                            const DEVICE float *norm, int columns, int tokens, int lane, PRIVATE float *sums,
                            PRIVATE float *squares) {
  const int runs = columns / 32, blocks = columns / Q::BLOCK;
  for (int i = 0; i < ROWS * T; ++i)
    sums[i] = 0.0f;
  for (int t = 0; t < T; ++t)
    squares[t] = 0.0f;
  for (int index = lane; index < runs; index += 32) {
    const int block = index / Q::RUNS, run = index % Q::RUNS;
    const int column = block * Q::BLOCK + Q::first(run);
    uint w[ROWS][Q::WORDS];
    for (int r = 0; r < ROWS; ++r)
      Q::load(weights, total, uint64_t(rows[r]) * blocks + block, run, w[r]);
    float a[ROWS][T], b[ROWS][T], near_sum[T], far_sum[T];
    for (int t = 0; t < T; ++t) {
      near_sum[t] = far_sum[t] = 0.0f;
      for (int r = 0; r < ROWS; ++r)
        a[r][t] = b[r][t] = 0.0f;
    }
    UNROLL
    for (int u = 0; u < 4; ++u) {
      float f[ROWS][8], gain[8];
      for (int r = 0; r < ROWS; ++r)
        Q::unit(w[r], u, f[r]);
      if (NORM) {
        load<4>(norm + column + 4 * u, gain);
        load<4>(norm + column + 4 * u + Q::DELTA, gain + 4);
      }
      for (int t = 0; t < T; ++t) {
        float v[8];
        const DEVICE X *from = x + uint64_t(t < tokens ? t : tokens - 1) * columns + column + 4 * u;
        load<4>(from, v);
        load<4>(from + Q::DELTA, v + 4);
        if (NORM)
          for (int i = 0; i < 8; ++i) {
            squares[t] += v[i] * v[i];
            v[i] *= gain[i];
          }
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
