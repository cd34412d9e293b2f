// One run of a row as plain numbers, at the place of its first near value.
template <typename Q, typename Y>
FUNCTION void expand_run(Bytes weights, uint64_t total, uint64_t block, int run, DEVICE Y *target) {
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
