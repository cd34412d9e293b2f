// The order of candidates, and where in it a count or a mass of probability is reached.
//
// Candidates stand by falling logit, equal ones by rising id. A logit's key is a number that grows with it; a place in
// the order is found digit by digit of the key: each pass over the row sums what each of 16 digits has. Sums are made
// in the same order every time.

enum { DIGIT_BITS = 4, DIGITS = 16 };

FUNCTION uint sort_key(float logit) {
  const uint bits = float_to_bits(logit + 0.0f); // -0 is 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
FUNCTION float logit_of(uint key) { return bits_to_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key); }

// A place: the candidates with `key`, and count and mass of those before them.
struct Place {
  uint key;
  float ties, count, mass;
};

// The first place at which `wanted` is reached: in candidates (BY_COUNT), or in mass, which must be more than `wanted`
// if STRICT. Bits of logits below LOWEST are 0. The last candidate where rounding lets nothing reach it. `shared` has THREADS / 32 + 1 times 32 numbers.
template <int SIMDS, int LOWEST, bool BY_COUNT, bool STRICT, typename X>
FUNCTION Place find_place(const DEVICE X *row, int vocabulary, float largest, float scale, float wanted, int thread_id,
                          GROUP float *shared) {
  Place place;
  place.key = 0;
  place.count = place.mass = place.ties = 0.0f;
  for (int shift = 32 - DIGIT_BITS; shift >= LOWEST; shift -= DIGIT_BITS) {
    float counts[DIGITS], masses[DIGITS];
    UNROLL
    for (int d = 0; d < DIGITS; ++d)
      counts[d] = masses[d] = 0.0f;
    for (int i = thread_id; i < vocabulary; i += SIMDS * 32) {
      const float logit = float(row[i]);
      const uint key = sort_key(logit), known = shift + DIGIT_BITS < 32 ? (key ^ place.key) >> (shift + DIGIT_BITS) : 0;
      const int digit = known ? -1 : int((key >> shift) & (DIGITS - 1));
      const float weight = exp2_of((logit - largest) * scale);
      UNROLL
      for (int d = 0; d < DIGITS; ++d) {
        counts[d] += digit >= d ? 1.0f : 0.0f;
        masses[d] += digit >= d ? weight : 0.0f;
      }
    }
    UNROLL
    for (int d = 0; d < DIGITS; ++d) {
      const float count = sum_lanes(counts[d]), mass = sum_lanes(masses[d]);
      if (thread_id % 32 == 0) {
        shared[thread_id / 32 * 32 + d] = count;
        shared[thread_id / 32 * 32 + DIGITS + d] = mass;
      }
    }
    barrier();
    if (thread_id < 32) {
      float sum = 0.0f;
      for (int s = 0; s < SIMDS; ++s)
        sum += shared[s * 32 + thread_id];
      shared[SIMDS * 32 + thread_id] = sum;
    }
    barrier();
    const GROUP float *sums = shared + SIMDS * 32; // of this digit or a larger one: 16 counts, 16 masses
    int chosen = -1;
    for (int d = DIGITS - 1; d >= 0; --d) {
      const float reached = BY_COUNT ? place.count + sums[d] : place.mass + sums[DIGITS + d];
      const bool is_filled = sums[d] > (d + 1 < DIGITS ? sums[d + 1] : 0.0f);
      if (is_filled) {
        chosen = d;
        if (STRICT ? reached > wanted : reached >= wanted)
          break;
      }
    }
    if (chosen < 0)
      chosen = 0; // only of what is not a number
    place.ties = sums[chosen] - (chosen + 1 < DIGITS ? sums[chosen + 1] : 0.0f);
    place.count += chosen + 1 < DIGITS ? sums[chosen + 1] : 0.0f;
    place.mass += chosen + 1 < DIGITS ? sums[DIGITS + chosen + 1] : 0.0f;
    place.key |= uint(chosen) << shift;
    barrier();
  }
  if (LOWEST > 0 && !(place.key & 0x80000000u)) // these bits are 0 in all logits
    place.key |= (1u << LOWEST) - 1;
  return place;
}
