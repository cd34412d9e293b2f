// The vector of one tier, as the linear kernels use it: one lane per output row, int32 or f32.
//
// A block of weights holds kBlockRows rows interleaved by 32-bit words; a tier whose vectors are shorter
// takes the block in kParts parts. Each operation here is exact or one IEEE operation per lane, so that equal
// sequences of them give equal bits in all tiers. load_some and store_some take the first `valid` lanes, none
// when it is not positive; the others read as 0. All in an anonymous namespace: no inline code with linkage
// may leave a tier's objects.
#pragma once

#include <stdint.h>
#include <string.h>

#include <utility>

#define MLXR_INLINE static inline __attribute__((always_inline))
#define MLXR_BODY __attribute__((always_inline))

#if defined(MLXR_TIER_avx512)
#include "linear/lanes_avx512.h"
#elif defined(MLXR_TIER_avx2)
#include "linear/lanes_avx2.h"
#elif defined(MLXR_TIER_neon)
#include "linear/lanes_neon.h"
#else
#include "linear/lanes_portable.h"
#endif

namespace {

// body(0), body(1), ... body(N-1) with constants, written out before the compiler splits arrays into
// registers (a loop that is unrolled later leaves them in memory). `body` is a lambda marked MLXR_BODY.
template <int N>
struct Index {
    constexpr operator int() const { return N; }
};
template <class Body, int... I>
MLXR_INLINE void repeat(const Body& body, std::integer_sequence<int, I...>) {
    (body(Index<I>{}), ...);
}
template <int N, class Body>
MLXR_INLINE void repeat(const Body& body) {
    repeat(body, std::make_integer_sequence<int, N>{});
}

#if !defined(MLXR_TIER_avx512)  // which has instructions for it
// dot_pair and dot_shorts with activations that are spread just for this.
template <bool Wide>
MLXR_INLINE Ints dot_pair_at(Ints sum, Ints w0, Ints w1, const int8_t* values) {
    return dot_pair<Wide>(sum, w0, w1, spread(values), spread(values + 4));
}
MLXR_INLINE Ints dot_shorts_at(Ints sum, Ints w, const int16_t* values) {
    return dot_shorts(sum, w, spread(values));
}
#endif

// Asks for `bytes` bytes of a stream of weights some way ahead of `at`; past the end of the stream it asks in vain. The
// hardware's own prefetcher stops at every page of 4 KiB and loses a third of the memory's rate here.
constexpr int kAheadBytes = 8192;
MLXR_INLINE void prefetch_ahead(const uint8_t* at, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + kAheadBytes + i);
}

constexpr int kBlockRows = 16;
constexpr int kParts = kBlockRows / kLanes;

MLXR_INLINE Ints bits_and(Ints a, uint32_t mask) {
    return bits_and(a, splat(static_cast<int32_t>(mask)));
}

// Byte `index` of each lane.
MLXR_INLINE Ints unsigned_byte(Ints a, int index) {
    return bits_and(shift_right(a, 8 * index), 0xffu);
}

}  // namespace
