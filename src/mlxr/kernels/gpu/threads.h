// The sum of v over a threadgroup of so many SIMD-groups, which put theirs into `parts`.
template <int SIMDS> FUNCTION float sum_threads(float v, GROUP float *parts, uint simd, uint lane) {
  v = sum_lanes(v);
  if (lane == 0)
    parts[simd] = v;
  barrier();
  float total = 0.0f;
  for (int i = 0; i < SIMDS; ++i)
    total += parts[i];
  return total;
}
