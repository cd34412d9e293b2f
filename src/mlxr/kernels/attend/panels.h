// What panels.body does with scores on their way to weights. Of a lane's scores, 4 j + 2 r + i is that of row r of two and
// position 8 j + 2 (lane % 4) + i of a tile.

// Scores of positions that a row does not see; it sees those before `seen`, with a window (0: none) so many before
// `behind`.
template <int TILE>
FUNCTION void hide_scores(PRIVATE float *scores, int first, PRIVATE const int *seen, PRIVATE const int *behind, int window) {
  UNROLL
  for (int j = 0; j < TILE / 8; ++j)
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const int position = first + 8 * j + i % 2;
      if (position >= seen[i / 2] || (window > 0 && position < behind[i / 2] - window))
        scores[4 * j + i] = -2e30f;
    }
}

// Scores become weights, relative to the largest one so far; `shrink` is what earlier weights are worth now.
template <int TILE>
FUNCTION void weigh_scores(PRIVATE float *scores, float factor, PRIVATE float *largest, PRIVATE float *total,
                           PRIVATE float *shrink) {
  UNROLL
  for (int r = 0; r < 2; ++r) {
    float highest = largest[r];
    UNROLL
    for (int j = 0; j < TILE / 8; ++j)
      highest = max_of(highest, max_of(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
    highest = max_of(highest, shuffle_xor(highest, 1));
    highest = max_of(highest, shuffle_xor(highest, 2));
    shrink[r] = power_of_two((largest[r] - highest) * factor);
    largest[r] = highest;
    const float level = highest * factor;
    float sum = 0.0f;
    UNROLL
    for (int j = 0; j < TILE / 8; ++j)
      UNROLL
      for (int i = 0; i < 2; ++i) {
        const float weight = power_of_two(scores[4 * j + 2 * r + i] * factor - level);
        scores[4 * j + 2 * r + i] = weight;
        sum += weight;
      }
    total[r] = total[r] * shrink[r] + sum;
  }
}
