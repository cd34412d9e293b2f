// A step of `sum_each`: a lane keeps KEPT numbers, of twice as many, and gives the others to the lane across `mask`.
template <int KEPT> FUNCTION void halve_numbers(PRIVATE float *numbers, bool is_upper, uint mask) {
  UNROLL
  for (int i = 0; i < KEPT; ++i) {
    const float own = is_upper ? numbers[i + KEPT] : numbers[i], given = is_upper ? numbers[i] : numbers[i + KEPT];
    numbers[i] = own + shuffle_xor(given, mask);
  }
  if (KEPT == 0)
    numbers[0] += shuffle_xor(numbers[0], mask);
}
// Each of COUNT numbers (1, 2, 4, ... 32) summed over the lanes of a SIMD-group: lane l gets number l * COUNT / 32.
template <int COUNT> FUNCTION float sum_each(PRIVATE float *numbers, int lane) {
  halve_numbers<COUNT / 2>(numbers, (lane & 16) != 0, 16u);
  halve_numbers<COUNT / 4>(numbers, (lane & 8) != 0, 8u);
  halve_numbers<COUNT / 8>(numbers, (lane & 4) != 0, 4u);
  halve_numbers<COUNT / 16>(numbers, (lane & 2) != 0, 2u);
  halve_numbers<COUNT / 32>(numbers, (lane & 1) != 0, 1u);
  return numbers[0];
}
