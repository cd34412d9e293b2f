// The probe's loops of one tier, compiled once per tier. See probe_table.h.
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wunused-function"  // of the lanes, only some are used here
#endif

#include "linear/lanes.h"
#include "probe/probe_table.h"

#define MLXR_JOIN_NAMES(a, b) a##b
#define MLXR_JOIN(a, b) MLXR_JOIN_NAMES(a, b)

namespace {

constexpr int kVectorBytes = 4 * kLanes;
constexpr int kReadVectors = 8;

MLXR_INLINE int32_t fold(Ints a) {
    int32_t words[kLanes], sum = 0;
    store_ints(words, a);
    for (int i = 0; i < kLanes; ++i) sum ^= words[i];
    return sum;
}

template <bool Ahead>
MLXR_INLINE int32_t read_stream(const uint8_t* data, int64_t bytes, int64_t ahead) {
    constexpr int kStepBytes = kReadVectors * kVectorBytes;
    Ints sums[kReadVectors];
    repeat<kReadVectors>([&](auto i) MLXR_BODY { sums[i] = splat(0); });
    for (const uint8_t *at = data, *end = data + bytes; at < end; at += kStepBytes) {
        if constexpr (Ahead) {
            for (int i = 0; i < kStepBytes; i += 64) __builtin_prefetch(at + ahead + i);
        }
        repeat<kReadVectors>([&](auto i) MLXR_BODY { sums[i] = bits_xor(sums[i], load_ints(at + kVectorBytes * i)); });
    }
    repeat<kReadVectors - 1>([&](auto i) MLXR_BODY { sums[0] = bits_xor(sums[0], sums[i + 1]); });
    return fold(sums[0]);
}

int32_t read_memory(const uint8_t* data, int64_t bytes, int64_t ahead) {
    return ahead > 0 ? read_stream<true>(data, bytes, ahead) : read_stream<false>(data, bytes, 0);
}

// A step multiplies kWeights pairs of vectors with kTokens pairs, each with its own sum, as a kernel's register tile
// does; as many as the tier has registers for.
#if defined(MLXR_TIER_avx512)
constexpr int kWeights = 3, kTokens = 4;
#else
constexpr int kWeights = 2, kTokens = 2;
#endif
constexpr int kStepWeightBytes = 2 * kWeights * kVectorBytes;
constexpr int64_t kSteps = mlxr::kProbeDataBytes / kStepWeightBytes;  // through the data once

int32_t multiply_steps(const uint8_t* data, int64_t steps) {
    Ints sums[kWeights][kTokens], a[2 * kTokens];
    repeat<2 * kTokens>([&](auto i) MLXR_BODY { a[i] = spread(reinterpret_cast<const int8_t*>(data) + 4 * i); });
    repeat<kWeights>([&](auto v) MLXR_BODY { repeat<kTokens>([&](auto m) MLXR_BODY { sums[v][m] = splat(m + 1); }); });
    while (steps > 0) {
        const int64_t now = steps < kSteps ? steps : kSteps;
        for (int64_t step = 0; step < now; ++step) {
            const uint8_t* at = data + step * kStepWeightBytes;
            repeat<kWeights>([&](auto v) MLXR_BODY {
                const Ints w0 = load_ints(at + 2 * v * kVectorBytes), w1 = load_ints(at + (2 * v + 1) * kVectorBytes);
                repeat<kTokens>([&](auto m) MLXR_BODY {
                    sums[v][m] = dot_pair<false>(sums[v][m], w0, w1, a[2 * m], a[2 * m + 1]);
                });
            });
        }
        steps -= now;
    }
    Ints total = splat(0);
    repeat<kWeights>(
        [&](auto v) MLXR_BODY { repeat<kTokens>([&](auto m) MLXR_BODY { total = bits_xor(total, sums[v][m]); }); });
    return fold(total);
}

#if defined(MLXR_SANITIZED)
int32_t read_stray(const uint8_t* data, int64_t at) {
    return fold(load_ints(data + at));
}

int32_t add(int32_t a, int32_t b) {
    return a + b;
}
#endif

constexpr mlxr::ProbeTable kTable{
    read_memory,
    multiply_steps,
    int64_t{kWeights} * kTokens * 2 * kVectorBytes,
#if defined(MLXR_SANITIZED)
    read_stray,
    add,
#endif
};

}  // namespace

extern "C" const mlxr::ProbeTable* MLXR_JOIN(mlxr_probe_, MLXR_TIER)() noexcept {
    return &kTable;
}
