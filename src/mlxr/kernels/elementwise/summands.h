// v gets N neighbours of x, if HAS_X, plus SHARES of `array`, each times `factor`; `theirs` gets the sum of OTHERS of
// `other`. Shares lie `step` numbers apart.
template <int N, bool HAS_X, int SHARES, int OTHERS, typename X, typename A, typename O>
FUNCTION void load_sum(PRIVATE float *v, PRIVATE float *theirs, const DEVICE X *x, const DEVICE A *array,
                       const DEVICE O *other, uint64_t at, uint64_t step, float factor) {
  float more[N];
  UNROLL
  for (int i = 0; i < N; ++i)
    v[i] = theirs[i] = 0.0f;
  if (HAS_X)
    load<N>(x + at, v);
  UNROLL
  for (int share = 0; share < SHARES; ++share) {
    load<N>(array + uint64_t(share) * step + at, more);
    UNROLL
    for (int i = 0; i < N; ++i)
      v[i] += more[i] * factor;
  }
  UNROLL
  for (int share = 0; share < OTHERS; ++share) {
    load<N>(other + uint64_t(share) * step + at, more);
    UNROLL
    for (int i = 0; i < N; ++i)
      theirs[i] += more[i];
  }
}
