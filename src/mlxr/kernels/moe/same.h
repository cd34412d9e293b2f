// Which lanes of a SIMD-group hold the same number, up to MOST: a bit for each of them, the own one too.
template <int MOST> FUNCTION uint find_same(int number) {
  uint same = 0xffffffffu;
  for (int bit = 1; bit <= MOST; bit <<= 1) {
    const bool is_set = (number & bit) != 0;
    const uint votes = vote_lanes(is_set);
    same &= is_set ? votes : ~votes;
  }
  return same;
}
