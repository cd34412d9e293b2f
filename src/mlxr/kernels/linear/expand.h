// One run of a row as plain numbers, at the place of its first near value.
template <typename Q, typename Y>
FUNCTION void expand_run(Bytes weights, Offset total, Offset block, int run, DEVICE Y *target) {
  uint w[Q::WORDS];
  float f[8], near[16], far[16], scale[2], offset[2];
  Q::load(weights, total, block, run, w);
  Q::scales(weights, total, block, run, scale, offset);
  UNROLL
  for (int u = 0; u < 4; ++u) {
    Q::unit(w, u, f);
    UNROLL
    for (int j = 0; j < 4; ++j) {
      near[4 * u + j] = scale[0] * f[j] + offset[0];
      far[4 * u + j] = scale[1] * f[4 + j] + offset[1];
    }
  }
  store<16>(target, near);
  store<16>(target + Q::DELTA, far);
}

// The first or the second eight near and far numbers of a run, of integers or a table, at the place of the first near one.
template <typename Q, typename Y>
FUNCTION void expand_half(Bytes weights, Offset total, Offset block, int run, bool second, DEVICE Y *target) {
  uint w[Q::WORDS];
  float f[8], near[8], far[8], scale[2], offset[2];
  Q::load(weights, total, block, run, w);
  Q::scales(weights, total, block, run, scale, offset);
  UNROLL
  for (int i = 0; i < 2; ++i) {
    w[i] = second ? w[i + 2] : w[i];
    w[4 + i] = second ? w[6 + i] : w[4 + i];
  }
  UNROLL
  for (int u = 0; u < 2; ++u) {
    Q::unit(w, u, f);
    UNROLL
    for (int j = 0; j < 4; ++j) {
      near[4 * u + j] = scale[0] * f[j] + offset[0];
      far[4 * u + j] = scale[1] * f[4 + j] + offset[1];
    }
  }
  store<8>(target, near);
  store<8>(target + Q::DELTA, far);
}
