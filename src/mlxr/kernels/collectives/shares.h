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
template <typename P> FUNCTION float half_of_word(uint word, int which) {
  P halves[4 / sizeof(P)];
  memcpy(halves, &word, 4);
  return float(halves[which % int(4 / sizeof(P))]);
}
