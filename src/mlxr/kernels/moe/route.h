// The largest of what the lanes of a SIMD-group hold.
FUNCTION float max_lanes(float v) {
  for (uint mask = 16; mask > 0; mask /= 2)
    v = max_of(v, shuffle_xor(v, mask));
  return v;
}
// A word in the order of floats, above 0 for every number; both zeros are equal.
FUNCTION uint order_float(float v) {
  const uint bits = float_to_bits(v == 0.0f ? 0.0f : v);
  return (bits >> 31) != 0u ? ~bits : bits | 0x80000000u;
}
FUNCTION float ordered_float(uint word) {
  return bits_to_float((word >> 31) != 0u ? word & 0x7FFFFFFFu : ~word);
}
