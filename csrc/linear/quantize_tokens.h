// Some tokens quantised together, as quantize.h does one by one: lanes are tokens where a token has one number. For
// AVX-512; the other tiers take them one by one.
#pragma once

#include "linear/quantize_steps.h"
#include "runtime/kernel_table.h"

namespace {

using mlxr::Activations;

// Tokens [token, token + count) at one group or span: `x` is the first token's, rows of `stride` floats.
#if defined(MLXR_TIER_avx512)

constexpr int kQuantizeTokens = 12;

// Lane i becomes the greatest of rows[i], for 16 rows.
MLXR_INLINE __m512i reduce_rows(const __m512i* rows) {
    __m512i half[8], quarter[4], pair[2];
    for (int i = 0; i < 8; ++i) {
        half[i] = _mm512_max_epi32(_mm512_shuffle_i64x2(rows[i], rows[i + 8], 0x44),
                                   _mm512_shuffle_i64x2(rows[i], rows[i + 8], 0xee));
    }
    for (int i = 0; i < 4; ++i) {
        quarter[i] = _mm512_max_epi32(_mm512_shuffle_i64x2(half[i], half[i + 4], 0x88),
                                      _mm512_shuffle_i64x2(half[i], half[i + 4], 0xdd));
    }
    for (int i = 0; i < 2; ++i) {
        pair[i] = _mm512_max_epi32(_mm512_unpacklo_epi64(quarter[i], quarter[i + 2]),
                                   _mm512_unpackhi_epi64(quarter[i], quarter[i + 2]));
    }
    const __m512 a = _mm512_castsi512_ps(pair[0]), b = _mm512_castsi512_ps(pair[1]);
    const __m512i mixed = _mm512_max_epi32(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                                           _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd)));
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15), mixed);
}

// Lanes first.. first + 7 of `a` and of `b`, by turns.
MLXR_INLINE __m512i interleave(__m512i a, __m512i b, int first) {
    const __m512i from = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_epi32(a, _mm512_add_epi32(from, _mm512_set1_epi32(first)), b);
}

// Sums of the first and the last 16 of each token's 32 bytes at `values`; tokens past `count` are not read.
MLXR_INLINE void sum_halves(const int8_t* values, int count, int32_t* low, int32_t* high) {
    const __m256i ones = _mm256_set1_epi8(1);
    for (int i = 0; i < count; i += 4) {
        __m256i quads[4];
        for (int j = 0; j < 4; ++j) {
            const int token = i + j < count ? i + j : i;
            const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + 32 * token));
            quads[j] = _mm256_dpbusd_epi32(_mm256_setzero_si256(), ones, bytes);
        }
        const __m256i sums =
            _mm256_hadd_epi32(_mm256_hadd_epi32(quads[0], quads[1]), _mm256_hadd_epi32(quads[2], quads[3]));
        _mm_store_si128(reinterpret_cast<__m128i*>(low + i), _mm256_castsi256_si128(sums));
        _mm_store_si128(reinterpret_cast<__m128i*>(high + i), _mm256_extracti128_si256(sums, 1));
    }
}

// The scales of `count` tokens and their inverses, 0 where all values count as zero. Lanes are tokens here: one
// division for all of them.
struct TokenScales {
    __m512 scale, inverse;
};
template <int Columns>
MLXR_INLINE TokenScales scale_tokens(const float* x, int64_t stride, int count, float most_magnitude) {
    __m512i rows[16];
    for (int i = 0; i < 16; ++i) {
        rows[i] = i < kQuantizeTokens ? largest_magnitudes<Columns>(x + (i < count ? i : 0) * stride)
                                      : _mm512_setzero_si512();
    }
    const __m512i largest = reduce_rows(rows);
    const __m512 top = _mm512_castsi512_ps(largest), most = _mm512_set1_ps(most_magnitude);
    const __mmask16 finite = _mm512_cmplt_epi32_mask(largest, _mm512_set1_epi32(0x7f800000));
    const __mmask16 some = finite & _mm512_cmp_ps_mask(top, _mm512_set1_ps(1e-30f), _CMP_GE_OQ);
    const __m512 nothing = _mm512_castsi512_ps(_mm512_maskz_set1_epi32(static_cast<__mmask16>(~finite), 0x7fc00000));
    return {_mm512_mask_div_ps(nothing, some, top, most), _mm512_maskz_div_ps(some, most, top)};
}

// Sums of 16 values, lanes are tokens.
struct TokenSums {
    __m512i first, last;
};

// The items from `at` on, whose scales are known: one store of each kind for all tokens.
MLXR_INLINE TokenSums quantize_items(const float* x, int64_t stride, int count, const float* inverse,
                                     const Activations& out, int64_t at) {
    alignas(64) int32_t low[16], high[16];
    // Times zero, infinities and NaN become NaN, and that 0x80000000, whose last byte is 0.
    int8_t* const values = out.values + 32 * at;
    for (int i = 0; i < count; ++i) {
        const __m512 factor = _mm512_set1_ps(inverse[i]);
        const float* row = x + i * stride;
        for (int part = 0; part < 32; part += 16) {
            const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(row + part), factor));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(values + 32 * i + part), _mm512_cvtepi32_epi8(rounded));
        }
    }
    sum_halves(values, count, low, high);
    const __mmask16 all = static_cast<__mmask16>((1u << count) - 1);
    const __m512i first = _mm512_load_si512(low), last = _mm512_load_si512(high), sum = _mm512_add_epi32(first, last);
    const auto put_halves = [&](int32_t* to, __m512i a, __m512i b) MLXR_BODY {
        _mm512_mask_storeu_epi32(to, static_cast<__mmask16>((1u << (2 * count < 16 ? 2 * count : 16)) - 1),
                                 interleave(a, b, 0));
        if (count > 8) {
            _mm512_mask_storeu_epi32(to + 16, static_cast<__mmask16>((1u << (2 * count - 16)) - 1),
                                     interleave(a, b, 8));
        }
    };
    for (int z = 0; z < mlxr::kZeroPointCount; ++z) {
        if (out.zeros[z] == nullptr) continue;
        const __m512i zero = _mm512_set1_epi32(-mlxr::kZeroPoints[z].value);
        if (mlxr::kZeroPoints[z].halves) {
            const __m512i bias = _mm512_set1_epi32(mlxr::kSecondHalf);
            put_halves(out.zeros[z] + 2 * at, _mm512_mullo_epi32(zero, first),
                       _mm512_add_epi32(bias, _mm512_mullo_epi32(zero, last)));
        } else {
            _mm512_mask_storeu_epi32(out.zeros[z] + at, all, _mm512_mullo_epi32(zero, sum));
        }
    }
    return {first, last};
}

MLXR_INLINE void quantize_groups_of(const float* x, int64_t stride, int count, const Activations& out, int64_t at) {
    const TokenScales scales = scale_tokens<32>(x, stride, count, kMostByte);
    alignas(64) float inverse[16];
    _mm512_store_ps(inverse, scales.inverse);
    const TokenSums sums = quantize_items(x, stride, count, inverse, out, at);
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(sums.first, sums.last));
    const __mmask16 all = static_cast<__mmask16>((1u << count) - 1);
    _mm512_mask_storeu_ps(out.scales + at, all, scales.scale);
    _mm512_mask_storeu_ps(out.scaled_sums + at, all, _mm512_mul_ps(scales.scale, sum));
}

// Four sums of each token, two and two in a word, `stride` sums from one token to the next.
MLXR_INLINE void put_span_sums(__m512i a, __m512i b, __m512i c, __m512i d, int count, int16_t* to, int stride) {
    const auto join = [](__m512i low, __m512i high)
                          MLXR_BODY { return _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_slli_epi32(high, 16)); };
    alignas(64) uint64_t words[16];
    const __m512i even = join(a, c), odd = join(b, d);
    _mm512_store_si512(words, interleave(even, odd, 0));
    _mm512_store_si512(words + 8, interleave(even, odd, 8));
    for (int i = 0; i < count; ++i) memcpy(to + stride * i, words + i, sizeof words[i]);
}

MLXR_INLINE void quantize_spans_of(const float* x, int64_t stride, int count, const Activations& out, int64_t at,
                                   int64_t span) {
    const TokenScales scales = scale_tokens<32 * mlxr::kSpanGroups>(x, stride, count, kMostByte);
    alignas(64) float inverse[16];
    _mm512_store_ps(inverse, scales.inverse);
    _mm512_mask_storeu_ps(out.scales + span, static_cast<__mmask16>((1u << count) - 1), scales.scale);
    for (int group = 0; group < mlxr::kSpanGroups; group += 4) {
        TokenSums sums[4];
        for (int i = 0; i < 4; ++i, at += out.tile) {
            sums[i] = quantize_items(x + 32 * (group + i), stride, count, inverse, out, at);
        }
        if (out.half_sums != nullptr) {
            int16_t* const to = out.half_sums + 16 * span + 2 * group;
            put_span_sums(sums[0].first, sums[0].last, sums[1].first, sums[1].last, count, to, 16);
            put_span_sums(sums[2].first, sums[2].last, sums[3].first, sums[3].last, count, to + 4, 16);
        }
        if (out.sums != nullptr) {
            const auto sum = [&](int i) MLXR_BODY { return _mm512_add_epi32(sums[i].first, sums[i].last); };
            put_span_sums(sum(0), sum(1), sum(2), sum(3), count, out.sums + 8 * span + group, 8);
        }
    }
}

MLXR_INLINE void quantize_short_tokens(const float* x, int64_t stride, int count, const Activations& out, int64_t at) {
    const TokenScales scales = scale_tokens<32>(x, stride, count, kMostShort);
    alignas(64) float inverse[16];
    _mm512_store_ps(inverse, scales.inverse);  // times zero as above
    for (int i = 0; i < count; ++i) round_shorts(x + i * stride, inverse[i], out.shorts + 32 * (at + i));
    _mm512_mask_storeu_ps(out.short_scales + at, static_cast<__mmask16>((1u << count) - 1),
                          _mm512_mul_ps(scales.scale, _mm512_set1_ps(kShortFactor)));
}

#else

constexpr int kQuantizeTokens = 1;

MLXR_INLINE void quantize_groups_of(const float*, int64_t, int, const Activations&, int64_t) {}
MLXR_INLINE void quantize_spans_of(const float*, int64_t, int, const Activations&, int64_t, int64_t) {}
MLXR_INLINE void quantize_short_tokens(const float*, int64_t, int, const Activations&, int64_t) {}

#endif

}  // namespace
