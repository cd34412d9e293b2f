// log(1 + t) for 0 <= t <= 1, also where 1 + t is 1.
FUNCTION float small_log(float t) { return t < 1e-3f ? t - 0.5f * t * t : log_of(1.0f + t); }

// The sums of four columns of all PARTS, COLUMNS apart, added up in the order in which lanes would do it.
template <int PARTS, int COLUMNS> FUNCTION void add_threads(const GROUP float *parts, PRIVATE float *sums) {
  float own[PARTS][4];
  UNROLL
  for (int p = 0; p < PARTS; ++p)
    load_shared(parts + p * COLUMNS, own[p]);
  UNROLL
  for (int step = 1; step < PARTS; step *= 2) {
    UNROLL
    for (int p = 0; p < PARTS; p += 2 * step) {
      UNROLL
      for (int n = 0; n < 4; ++n)
        own[p][n] += own[p + step][n];
    }
  }
  UNROLL
  for (int n = 0; n < 4; ++n)
    sums[n] = own[0][n];
}
