// What quantize.h does with 32 values, in the instructions of each tier.
#pragma once

#include "linear/lanes.h"
#include "runtime/kernel_table.h"

namespace {

MLXR_INLINE float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#if defined(MLXR_TIER_avx512) || defined(MLXR_TIER_avx2)
// The sums of the first and of the last four.
MLXR_INLINE void add_quads(__m256i quads, int32_t* sums) {
    quads = _mm256_hadd_epi32(quads, quads);
    quads = _mm256_hadd_epi32(quads, quads);
    sums[0] = _mm256_extract_epi32(quads, 0);
    sums[1] = _mm256_extract_epi32(quads, 4);
}

MLXR_INLINE int largest_half_sum(const int8_t* values, int64_t stride) {
    __m256i top = _mm256_setzero_si256();
    for (int group = 0; group < mlxr::kSpanGroups; ++group) {
        const auto* const at = reinterpret_cast<const __m256i*>(values + stride * group);
        const __m256i eights = _mm256_sad_epu8(_mm256_abs_epi8(_mm256_loadu_si256(at)), _mm256_setzero_si256());
        top = _mm256_max_epi32(top, _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0x4e)));
    }
    const int first = _mm256_extract_epi32(top, 0), last = _mm256_extract_epi32(top, 4);
    return first > last ? first : last;
}
#endif

// A tier's steps: the largest magnitude of Columns values, as bits (ordered as integers, NaN above infinity), and
// 32 times x * inverse rounded to int8, with the sums of the first and the last 16. And for both x86 tiers in the same
// instructions, the largest sum of 16 magnitudes of a span, whose groups are `stride` bytes apart.
#if defined(MLXR_TIER_avx512)

template <int Columns>
MLXR_INLINE __m512i largest_magnitudes(const float* x) {
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    __m512i top[2];
    for (int i = 0; i < Columns; i += 32) {
        for (int j = 0; j < 2; ++j) {
            const __m512i magnitudes = _mm512_and_si512(_mm512_loadu_si512(x + i + 16 * j), mask);
            top[j] = i == 0 ? magnitudes : _mm512_max_epi32(top[j], magnitudes);
        }
    }
    return _mm512_max_epi32(top[0], top[1]);
}

template <int Columns>
MLXR_INLINE int32_t largest_magnitude(const float* x) {
    return _mm512_reduce_max_epi32(largest_magnitudes<Columns>(x));
}

MLXR_INLINE void round_group(const float* x, float inverse, int8_t* values, int32_t* sums) {
    const __m512 factor = _mm512_set1_ps(inverse);
    const __m128i low = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), factor)));
    const __m128i high = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), factor)));
    const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values), bytes);
    const __m256i quads = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
    add_quads(quads, sums);
}

MLXR_INLINE void round_shorts(const float* x, float inverse, int16_t* values) {
    const __m512 factor = _mm512_set1_ps(inverse);
    for (int i = 0; i < 32; i += 16) {
        const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), factor));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + i), _mm512_cvtepi32_epi16(rounded));
    }
}

#elif defined(MLXR_TIER_avx2)

template <int Columns>
MLXR_INLINE int32_t largest_magnitude(const float* x) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i top = _mm256_and_si256(load_ints(x), mask);
    for (int i = 8; i < Columns; i += 8) top = _mm256_max_epi32(top, _mm256_and_si256(load_ints(x + i), mask));
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
    const __m256i quads = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
    add_quads(quads, sums);
}

MLXR_INLINE void round_shorts(const float* x, float inverse, int16_t* values) {
    const __m256 factor = _mm256_set1_ps(inverse);
    for (int i = 0; i < 32; i += 16) {
        const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), factor));
        const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), factor));
        store_ints(values + i, _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
    }
}

#elif defined(MLXR_TIER_neon)

template <int Columns>
MLXR_INLINE int32_t largest_magnitude(const float* x) {
    uint32x4_t top[2];
    for (int i = 0; i < Columns; i += 4) {
        const uint32x4_t magnitudes = vbicq_u32(as_unsigned(load_ints(x + i)), vdupq_n_u32(0x80000000u));
        top[i / 4 % 2] = i < 8 ? magnitudes : vmaxq_u32(top[i / 4 % 2], magnitudes);
    }
    return static_cast<int32_t>(vmaxvq_u32(vmaxq_u32(top[0], top[1])));
}

// Eight values times a factor, to the nearest integers.
MLXR_INLINE int16x8_t round_eight(const float* x, float32x4_t factor) {
    const int32x4_t low = vcvtnq_s32_f32(vmulq_f32(vld1q_f32(x), factor));
    const int32x4_t high = vcvtnq_s32_f32(vmulq_f32(vld1q_f32(x + 4), factor));
    return vcombine_s16(vmovn_s32(low), vmovn_s32(high));
}

MLXR_INLINE void round_group(const float* x, float inverse, int8_t* values, int32_t* sums) {
    const float32x4_t factor = vdupq_n_f32(inverse);
    for (int half = 0; half < 2; ++half) {
        const int16x8_t low = round_eight(x + 16 * half, factor), high = round_eight(x + 16 * half + 8, factor);
        const int8x16_t bytes = vcombine_s8(vmovn_s16(low), vmovn_s16(high));
        vst1q_s8(values + 16 * half, bytes);
        sums[half] = vaddvq_s32(vdotq_s32(vdupq_n_s32(0), bytes, vdupq_n_s8(1)));
    }
}

MLXR_INLINE void round_shorts(const float* x, float inverse, int16_t* values) {
    for (int i = 0; i < 32; i += 8) vst1q_s16(values + i, round_eight(x + i, vdupq_n_f32(inverse)));
}

MLXR_INLINE int largest_half_sum(const int8_t* values, int64_t stride) {
    int largest = 0;
    for (int group = 0; group < mlxr::kSpanGroups; ++group, values += stride) {
        for (int half = 0; half < 32; half += 16) {
            const int sum = vaddlvq_u8(vreinterpretq_u8_s8(vabsq_s8(vld1q_s8(values + half))));
            largest = sum > largest ? sum : largest;
        }
    }
    return largest;
}

#else

template <int Columns>
MLXR_INLINE int32_t largest_magnitude(const float* x) {
    int32_t bits[Columns], largest = 0;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < Columns; ++i) {
        const int32_t magnitude = bits[i] & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

// Adding 1.5*2^23 leaves the integer, rounded to nearest even, in the low bits.
MLXR_INLINE int32_t round_product(float x, float inverse) {
    return static_cast<int32_t>((x * inverse + 12582912.0f) - 12582912.0f);
}

MLXR_INLINE void round_group(const float* x, float inverse, int8_t* values, int32_t* sums) {
    int32_t rounded[32], low = 0, high = 0;
    for (int i = 0; i < 32; ++i) rounded[i] = round_product(x[i], inverse);
    for (int i = 0; i < 16; ++i) low += rounded[i];
    for (int i = 16; i < 32; ++i) high += rounded[i];
    for (int i = 0; i < 32; ++i) values[i] = static_cast<int8_t>(rounded[i]);
    sums[0] = low;
    sums[1] = high;
}

MLXR_INLINE void round_shorts(const float* x, float inverse, int16_t* values) {
    for (int i = 0; i < 32; ++i) values[i] = static_cast<int16_t>(round_product(x[i], inverse));
}

MLXR_INLINE int largest_half_sum(const int8_t* values, int64_t stride) {
    int largest = 0;
    for (int group = 0; group < mlxr::kSpanGroups; ++group, values += stride) {
        for (int half = 0; half < 32; half += 16) {
            int sum = 0;
            for (int i = half; i < half + 16; ++i) sum += values[i] < 0 ? -values[i] : values[i];
            largest = sum > largest ? sum : largest;
        }
    }
    return largest;
}

#endif

constexpr float kMostByte = 127.0f, kMostShort = 4095.0f;
constexpr float kShortFactor = 0x1p-24f;  // of the scales of shorts, see add_short_sum

}  // namespace
