// Activations to int8: scale = largest magnitude / 127 of a group of 32 columns, or of a span of 256, values rounded to
// nearest even. For 16-bit weights to shorts: groups with 4095, so that 32 products with weights below 2**14 stay under
// 2**31.
//
// Every step is exact or one IEEE operation, so all tiers agree. A group or span with an infinity or a NaN gets a NaN
// scale, so that it shows in every output it touches instead of vanishing. One below 1e-30 counts as zero: the
// reciprocal of its scale would overflow.
#pragma once

#include "kernel_table.h"
#include "linear/lanes.h"

namespace {

using mlxr::Activations;
using mlxr::QuantizeJob;

MLXR_INLINE float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// A tier's steps: the largest magnitude of Columns values, as bits (ordered as integers, NaN above infinity), and
// 32 times x * inverse rounded to int8, with the sums of the first and the last 16.
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
    __m256i quads = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
    quads = _mm256_hadd_epi32(quads, quads);
    quads = _mm256_hadd_epi32(quads, quads);
    sums[0] = _mm256_extract_epi32(quads, 0);
    sums[1] = _mm256_extract_epi32(quads, 4);
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
    __m256i quads = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
    quads = _mm256_hadd_epi32(quads, quads);
    quads = _mm256_hadd_epi32(quads, quads);
    sums[0] = _mm256_extract_epi32(quads, 0);
    sums[1] = _mm256_extract_epi32(quads, 4);
}

MLXR_INLINE void round_shorts(const float* x, float inverse, int16_t* values) {
    const __m256 factor = _mm256_set1_ps(inverse);
    for (int i = 0; i < 32; i += 16) {
        const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), factor));
        const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), factor));
        store_ints(values + i, _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
    }
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

#endif

constexpr float kMostByte = 127.0f, kMostShort = 4095.0f;
constexpr float kShortFactor = 0x1p-24f;  // of the scales of shorts, see add_short_sum

// The scale of some values and its inverse, of which 0 says that all count as zero.
struct Scale {
    float scale, inverse;
};
template <int Columns>
MLXR_INLINE Scale find_scale(const float* x, float most) {
    const int32_t largest = largest_magnitude<Columns>(x);
    const float top = float_from_bits(static_cast<uint32_t>(largest));
    if (largest >= 0x7f800000) return {float_from_bits(0x7fc00000u), 0.0f};
    if (top < 1e-30f) return {0.0f, 0.0f};
    return {top / most, most / top};
}

// 32 values, the item `at`, whose scale is known; the sums of both halves to `sums`.
MLXR_INLINE void quantize_item(const float* x, float inverse, const Activations& out, int64_t at, int32_t* sums) {
    int8_t* const values = out.values + 32 * at;
    if (inverse == 0.0f) {
        memset(values, 0, 32);
        sums[0] = sums[1] = 0;
    } else {
        round_group(x, inverse, values, sums);
    }
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

MLXR_INLINE void quantize_group(const float* x, const Activations& out, int64_t at) {
    const Scale group = find_scale<32>(x, kMostByte);
    int32_t sums[2];
    quantize_item(x, group.inverse, out, at, sums);
    out.scales[at] = group.scale;
    out.scaled_sums[at] = group.scale * static_cast<float>(sums[0] + sums[1]);
}

// A span, whose first item is `at`.
MLXR_INLINE void quantize_span(const float* x, const Activations& out, int64_t at, int64_t span) {
    const Scale scale = find_scale<32 * mlxr::kSpanGroups>(x, kMostByte);
    out.scales[span] = scale.scale;
    for (int group = 0; group < mlxr::kSpanGroups; ++group, at += out.tile) {
        int32_t sums[2];
        quantize_item(x + 32 * group, scale.inverse, out, at, sums);
        if (out.sums != nullptr) {
            out.sums[8 * span + mlxr::span_order(group)] = static_cast<int16_t>(sums[0] + sums[1]);
        }
        if (out.half_sums != nullptr) {
            out.half_sums[16 * span + mlxr::span_order(2 * group)] = static_cast<int16_t>(sums[0]);
            out.half_sums[16 * span + mlxr::span_order(2 * group + 1)] = static_cast<int16_t>(sums[1]);
        }
    }
}

MLXR_INLINE float quantize_short_group(const float* x, int16_t* values) {
    const Scale group = find_scale<32>(x, kMostShort);
    if (group.inverse == 0.0f) {
        memset(values, 0, 32 * sizeof(int16_t));
    } else {
        round_shorts(x, group.inverse, values);
    }
    return group.scale * kShortFactor;
}

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
        const __m512i from = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        const __m512i rest = _mm512_add_epi32(from, _mm512_set1_epi32(8));
        _mm512_mask_storeu_epi32(to, static_cast<__mmask16>((1u << (2 * count < 16 ? 2 * count : 16)) - 1),
                                 _mm512_permutex2var_epi32(a, from, b));
        if (count > 8) {
            _mm512_mask_storeu_epi32(to + 16, static_cast<__mmask16>((1u << (2 * count - 16)) - 1),
                                     _mm512_permutex2var_epi32(a, rest, b));
        }
    };
    for (int z = 0; z < mlxr::kZeroPointCount; ++z) {
        if (out.zeros[z] == nullptr) continue;
        const __m512i zero = _mm512_set1_epi32(-mlxr::kZeroPoints[z].value);
        if (mlxr::kZeroPoints[z].halves) {
            put_halves(out.zeros[z] + 2 * at, _mm512_mullo_epi32(zero, first), _mm512_mullo_epi32(zero, last));
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
    const __m512i from = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    _mm512_store_si512(words, _mm512_permutex2var_epi32(even, from, odd));
    _mm512_store_si512(words + 8, _mm512_permutex2var_epi32(even, _mm512_add_epi32(from, _mm512_set1_epi32(8)), odd));
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

constexpr int kFewTokens = 3;  // so many are faster one by one

// body(x of the first token, its token, its item, group, tokens, columns of x) for every Groups-th group of every run
// of tokens that are quantised together.
template <int Groups, class Body>
MLXR_INLINE void visit_groups(const QuantizeJob& job, const Body& body) {
    const Activations out = *job.activations;
    for (int64_t token = job.first_token; token < job.last_token;) {
        const int64_t in_tile = out.tile - token % out.tile, left = job.last_token - token;
        const int64_t whole = in_tile < left ? in_tile : left;
        const int count = static_cast<int>(whole < kQuantizeTokens ? whole : kQuantizeTokens);
        const float* x = job.x + (token - job.first_token) * job.x_stride;
        int64_t at = mlxr::item_index(out, token, job.first_group);
        int64_t columns = job.columns;
        for (int64_t group = job.first_group; group < job.last_group; group += Groups) {
            body(x, token, at, group, count, columns);
            x += 32 * Groups;
            columns -= 32 * Groups;
            at += Groups * out.tile;
        }
        token += count;
    }
}

void quantize_groups(const QuantizeJob& job) {
    const Activations out = *job.activations;
    visit_groups<1>(job, [&](const float* x, int64_t, int64_t at, int64_t, int count, int64_t) MLXR_BODY {
        if (kQuantizeTokens > 1 && count > kFewTokens) {
            quantize_groups_of(x, job.x_stride, count, out, at);
        } else {
            for (int i = 0; i < count; ++i) quantize_group(x + i * job.x_stride, out, at + i);
        }
    });
}

void quantize_spans(const QuantizeJob& job) {
    const Activations out = *job.activations;
    visit_groups<mlxr::kSpanGroups>(
        job, [&](const float* x, int64_t token, int64_t at, int64_t group, int count, int64_t) MLXR_BODY {
            const int64_t span = mlxr::span_index(out, token, group / mlxr::kSpanGroups);
            if (kQuantizeTokens > 1 && count > kFewTokens) {
                quantize_spans_of(x, job.x_stride, count, out, at, span);
            } else {
                for (int i = 0; i < count; ++i) quantize_span(x + i * job.x_stride, out, at + i, span + i);
            }
        });
}

void quantize_shorts(const QuantizeJob& job) {
    const Activations out = *job.activations;
    visit_groups<1>(job, [&](const float* x, int64_t, int64_t at, int64_t, int count, int64_t columns) MLXR_BODY {
        if (kQuantizeTokens > 1 && count > kFewTokens && columns >= 32) {
            return quantize_short_tokens(x, job.x_stride, count, out, at);
        }
        for (int i = 0; i < count; ++i) {
            float filled[32] = {};
            const float* row = x + i * job.x_stride;
            if (columns < 32) {
                for (int64_t column = 0; column < columns; ++column) filled[column] = row[column];
                row = filled;
            }
            out.short_scales[at + i] = quantize_short_group(row, out.shorts + 32 * (at + i));
        }
    });
}

}  // namespace
