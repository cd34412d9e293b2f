// Activations to int8: groups of 32 columns, scale = largest magnitude / 127, values rounded to nearest even.
//
// Every step is exact or one IEEE operation, so all tiers agree. A group with an infinity or a NaN gets a NaN
// scale, so that it shows in every output it touches instead of vanishing. A group below 1e-30 counts as
// zero: the reciprocal of its scale would overflow.
#pragma once

#include "kernel_table.h"
#include "linear/lanes.h"

namespace {

using mlxr::Activations;

MLXR_INLINE float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// A tier's steps: the largest magnitude of 32 values, as bits (ordered as integers, NaN above infinity), and
// x * inverse rounded to int8, with the sums of the first and the last 16.
#if defined(MLXR_TIER_avx512)

MLXR_INLINE int32_t largest_magnitude(const float* x) {
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    const __m512i low = _mm512_and_si512(_mm512_loadu_si512(x), mask);
    return _mm512_reduce_max_epi32(_mm512_max_epi32(low, _mm512_and_si512(_mm512_loadu_si512(x + 16), mask)));
}

MLXR_INLINE void round_group(const float* x, float inverse, int8_t* values, int32_t* sums) {
    const __m512 factor = _mm512_set1_ps(inverse);
    const __m128i low = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), factor)));
    const __m128i high = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), factor)));
    const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), bytes);
    __m256i quads = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
    quads = _mm256_hadd_epi32(quads, quads);
    quads = _mm256_hadd_epi32(quads, quads);
    sums[0] = _mm256_extract_epi32(quads, 0);
    sums[1] = _mm256_extract_epi32(quads, 4);
}

#elif defined(MLXR_TIER_avx2)

MLXR_INLINE int32_t largest_magnitude(const float* x) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i top = _mm256_and_si256(load_ints(x), mask);
    for (int i = 8; i < 32; i += 8) top = _mm256_max_epi32(top, _mm256_and_si256(load_ints(x + i), mask));
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

MLXR_INLINE void round_group(const float* x, float inverse, int8_t* values, int32_t* sums) {
    const __m256 factor = _mm256_set1_ps(inverse);
    __m256i ints[4];
    for (int i = 0; i < 4; ++i) ints[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), factor));
    const __m256i mixed =
        _mm256_packs_epi16(_mm256_packs_epi32(ints[0], ints[1]), _mm256_packs_epi32(ints[2], ints[3]));
    const __m256i bytes = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), bytes);
    __m256i quads = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
    quads = _mm256_hadd_epi32(quads, quads);
    quads = _mm256_hadd_epi32(quads, quads);
    sums[0] = _mm256_extract_epi32(quads, 0);
    sums[1] = _mm256_extract_epi32(quads, 4);
}

#else

MLXR_INLINE int32_t largest_magnitude(const float* x) {
    int32_t bits[32], largest = 0;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < 32; ++i) {
        const int32_t magnitude = bits[i] & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

MLXR_INLINE void round_group(const float* x, float inverse, int8_t* values, int32_t* sums) {
    int32_t rounded[32], low = 0, high = 0;
    // Adding 1.5*2^23 leaves the integer, rounded to nearest even, in the low bits.
    for (int i = 0; i < 32; ++i) rounded[i] = static_cast<int32_t>((x[i] * inverse + 12582912.0f) - 12582912.0f);
    for (int i = 0; i < 16; ++i) low += rounded[i];
    for (int i = 16; i < 32; ++i) high += rounded[i];
    for (int i = 0; i < 32; ++i) values[i] = static_cast<int8_t>(rounded[i]);
    sums[0] = low;
    sums[1] = high;
}

#endif

// Quantises 32 values, and returns their scale and the sums of both halves.
MLXR_INLINE float quantize_group(const float* x, int8_t* values, int32_t* sums) {
    const int32_t largest = largest_magnitude(x);
    const float top = float_from_bits(static_cast<uint32_t>(largest));
    const bool finite = largest < 0x7f800000;
    if (!finite || top < 1e-30f) {
        memset(values, 0, 32);
        sums[0] = sums[1] = 0;
        return finite ? 0.0f : float_from_bits(0x7fc00000u);
    }
    round_group(x, 127.0f / top, values, sums);
    return top / 127.0f;
}

void quantize_activations(const float* x, int64_t first, int64_t last, const Activations& job) {
    const Activations out = job;
    for (int64_t token = first; token < last; ++token) {
        const float* row = x + token * out.groups * 32;
        for (int64_t group = 0; group < out.groups; ++group) {
            const int64_t at = mlxr::item_index(out, token, group);
            int32_t* sums = out.half_sums + 2 * at;
            out.scales[at] = quantize_group(row + 32 * group, out.values + 32 * at, sums);
            out.scaled_sums[at] = out.scales[at] * static_cast<float>(sums[0] + sums[1]);
            for (int z = 0; z < mlxr::kZeroPointCount; ++z) {
                if (out.zeros[z] == nullptr) continue;
                const int32_t zero = mlxr::kZeroPoints[z].value;
                if (mlxr::kZeroPoints[z].halves) {
                    out.zeros[z][2 * at] = -zero * sums[0];
                    out.zeros[z][2 * at + 1] = -zero * sums[1];
                } else {
                    out.zeros[z][at] = -zero * (sums[0] + sums[1]);
                }
            }
        }
    }
}

}  // namespace
