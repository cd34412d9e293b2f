// Activations to int8: scale = largest magnitude / 127 of a group of 32 columns, or of a span of 256, values rounded to
// nearest even. For 16-bit weights to shorts: groups with 4095, so that 32 products with weights below 2**14 stay under
// 2**31. In a span any 16 values from a multiple of 16 on have magnitudes that sum up to 1023 at most, so that their
// products with weights of six bits fit into 16 bits: where they would sum up to more, which takes 16 that are on
// average half as large as the largest, the span's scale grows, at most to about twice as much.
//
// Every step is exact or one IEEE operation, so all tiers agree. A group or span with an infinity or a NaN gets a NaN
// scale, so that it shows in every output it touches instead of vanishing. One below 1e-30 counts as zero: the
// reciprocal of its scale would overflow.
#pragma once

#include "linear/quantize_tokens.h"

namespace {

using mlxr::QuantizeJob;

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
            out.zeros[z][2 * at + 1] = mlxr::kSecondHalf - zero * sums[1];
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

// A span, whose first item is `at`, with a scale that is known.
MLXR_INLINE void quantize_span_to(const float* x, Scale scale, const Activations& out, int64_t at, int64_t span) {
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

constexpr int kMostHalfSum = 1023;  // times 32, the greatest magnitude of six bits, it is below 2**15
MLXR_INLINE int largest_half_sum(const Activations& out, int64_t at) {
    return largest_half_sum(out.values + 32 * at, 32 * out.tile);
}

MLXR_INLINE void quantize_span(const float* x, const Activations& out, int64_t at, int64_t span) {
    const Scale scale = find_scale<32 * mlxr::kSpanGroups>(x, kMostByte);
    quantize_span_to(x, scale, out, at, span);
    const int sum = largest_half_sum(out, at);
    if (sum <= kMostHalfSum) return;
    // Rounding moves a sum by 8 at most, before and after.
    const float wider = static_cast<float>(sum + 8) / static_cast<float>(kMostHalfSum - 9);
    quantize_span_to(x, {scale.scale * wider, scale.inverse / wider}, out, at, span);
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

// Where a tile has one token, its groups lie side by side, as one group of several tokens does otherwise.
void quantize_groups_of_one(const QuantizeJob& job, const Activations& out) {
    const float* row = job.x;
    for (int64_t token = job.first_token; token < job.last_token; ++token, row += job.x_stride) {
        for (int64_t group = job.first_group; group < job.last_group; group += kQuantizeTokens) {
            const int64_t left = job.last_group - group;
            quantize_groups_of(row + 32 * (group - job.first_group), 32,
                               static_cast<int>(left < kQuantizeTokens ? left : kQuantizeTokens), out,
                               mlxr::item_index(out, token, group));
        }
    }
}

void quantize_groups(const QuantizeJob& job) {
    const Activations out = *job.activations;
    if (kQuantizeTokens > 1 && out.tile == 1) return quantize_groups_of_one(job, out);
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
                for (int i = 0; i < count; ++i) {
                    if (largest_half_sum(out, at + i) > kMostHalfSum) {
                        quantize_span(x + i * job.x_stride, out, at + i, span + i);
                    }
                }
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
