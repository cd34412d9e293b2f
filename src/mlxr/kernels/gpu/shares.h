// N neighbours of the sum of SHARES arrays, each `stride` numbers behind the one before.
template <int N, int SHARES, typename T>
FUNCTION void load_shares(const DEVICE T *p, uint64_t stride, PRIVATE float *out) {
  load<N>(p, out);
  UNROLL
  for (int s = 1; s < SHARES; ++s) {
    float more[N];
    load<N>(p + s * stride, more);
    UNROLL
    for (int i = 0; i < N; ++i)
      out[i] += more[i];
  }
}
