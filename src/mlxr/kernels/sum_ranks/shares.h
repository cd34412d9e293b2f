// What a rank has of a sum, in shares that lie `step` numbers apart.
template <int SHARES, int N, typename P>
FUNCTION void add_up(PRIVATE float *v, const DEVICE P *parts, uint64_t at, uint64_t step) {
  float more[N];
  load<N>(parts + at, v);
  UNROLL
  for (int share = 1; share < SHARES; ++share) {
    load<N>(parts + uint64_t(share) * step + at, more);
    UNROLL
    for (int j = 0; j < N; ++j)
      v[j] += more[j];
  }
}
