// The largest of what the lanes of a SIMD-group hold.
FUNCTION float max_lanes(float v) {
  for (uint mask = 16; mask > 0; mask /= 2)
    v = max_of(v, shuffle_xor(v, mask));
  return v;
}
