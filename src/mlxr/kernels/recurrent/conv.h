// N neighbouring inputs of a convolution: x, or where IS_GATED what stands at `p` times x, two blocks of channels behind.
template <int N, bool IS_GATED, typename From> FUNCTION void load_input(PRIVATE float *u, From p, int channels) {
  load<N>(p, u);
  if (IS_GATED) {
    float more[N];
    load<N>(p + 2 * uint64_t(channels), more);
    UNROLL
    for (int n = 0; n < N; ++n)
      u[n] *= more[n];
  }
}
