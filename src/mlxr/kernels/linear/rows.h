// A few rows of x times some rows of quantised weights, by one SIMD-group.
//
// Lanes take the units of a row in turn. A unit's eight numbers are multiplied as they come; scale and offset follow
// once per quad, so that the sum of x over a quad is shared by all weight rows.

template <typename Q, int ROWS, int T, typename X>
FUNCTION void multiply_rows(const DEVICE uint8_t *weights, const DEVICE X *x, int first_row, int rows, int columns,
                            int tokens, int lane, PRIVATE float *sums) {
  const int units = columns / Q::BLOCK * Q::UNITS;
  const uint64_t row_bytes = uint64_t(columns / Q::BLOCK) * Q::BYTES;
  for (int i = 0; i < ROWS * T; ++i)
    sums[i] = 0.0f;
  for (int unit = lane; unit < units; unit += 32) {
    const int block = unit / Q::UNITS, within = unit % Q::UNITS;
    const int column = block * Q::BLOCK + Q::first(within);
    float near[T][4], far[T][4], near_sum[T], far_sum[T];
    for (int t = 0; t < T; ++t) {
      const DEVICE X *row = x + uint64_t(t < tokens ? t : tokens - 1) * columns + column;
      load<4>(row, near[t]);
      load<4>(row + Q::DELTA, far[t]);
      near_sum[t] = (near[t][0] + near[t][1]) + (near[t][2] + near[t][3]);
      far_sum[t] = (far[t][0] + far[t][1]) + (far[t][2] + far[t][3]);
    }
    for (int r = 0; r < ROWS; ++r) {
      const int row = first_row + r < rows ? first_row + r : rows - 1;
      float f[8], scale[2], offset[2];
      Q::unit(weights + row * row_bytes + uint64_t(block) * Q::BYTES, within, f, scale, offset);
      for (int t = 0; t < T; ++t) {
        float a = f[0] * near[t][0], b = f[4] * far[t][0];
        for (int i = 1; i < 4; ++i) {
          a += f[i] * near[t][i];
          b += f[4 + i] * far[t][i];
        }
        sums[r * T + t] += (scale[0] * a + offset[0] * near_sum[t]) + (scale[1] * b + offset[1] * far_sum[t]);
      }
    }
  }
}
