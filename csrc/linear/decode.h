// Raw blocks back to f32, in the words of unpack.h: 16 blocks that follow one another are repacked as if they were
// rows.
//
// Each value is what ggml's definition gives, bit for bit: products of a step and a small integer are exact in f32, so
// it has one rounding at most, or the two that its definition has.
#pragma once

#include "linear/repack.h"
#include "linear/unpack.h"

namespace {

// Minimum `index` of a span.
MLXR_INLINE Floats min_at(const Scales& s, int index) {
    const Ints pair = s.mins[index / 4 * 2 + index % 2];
    return to_floats(index / 2 % 2 == 0 ? lower_half(pair) : upper_half(pair));
}

// A group's 16 or 32 columns from word `first` on: step * (q - zero) + shift, as floats by lane.
MLXR_INLINE void decode_words(const Ints* w, int first, int last, int zero, Floats step, Floats shift, bool shifted,
                              float* out) {
    for (int i = first; i < last; ++i) {
        for (int b = 0; b < 4; ++b) {
            const Floats value = mul(step, to_floats(add(unsigned_byte(w[i], b), splat(-zero))));
            store_floats(out + kLanes * (4 * i + b), shifted ? add(value, shift) : value);
        }
    }
}

template <class W, int J>
MLXR_INLINE void decode_stride(Unit unit, int n, const Scales& s, float* out) {
    if constexpr (J < W::kStride) {
        constexpr Form F = W::kForm;
        constexpr int kZero = W::kZeroPoint < 0 ? 0 : mlxr::kZeroPoints[W::kZeroPoint].value;
        constexpr bool kDecodesOtherwise = F == Form::shifted && kZero > 0;
        const int g = n * W::kStride + J;
        float* const group = out + kLanes * 32 * g;
        Ints w[8];
        W::template weights<J>(unit, n, w);
        if constexpr (is_fine(F)) {
            const Floats steps[2] = {mul(s.step[0], to_floats(upper_half(s.fine[g]))),
                                     mul(s.step[0], to_floats(lower_half(s.fine[g])))};
            for (int half = 0; half < 2; ++half) {
                const Floats shift = F == Form::fine_shifted ? mul(s.least, min_at(s, 2 * g + half)) : splat(0.0f);
                decode_words(w, 4 * half, 4 * half + 4, kZero, steps[half], shift, F == Form::fine_shifted, group);
            }
        } else if constexpr (F == Form::halved) {
            decode_words(w, 0, 4, kZero, s.step[g], splat(0.0f), false, group);
            decode_words(w, 4, 8, kZero, s.second[g], splat(0.0f), false, group);
        } else {
            Floats shift = splat(0.0f);
            if constexpr (F == Form::span_shifted) shift = mul(s.least, min_at(s, g));
            if constexpr (kDecodesOtherwise) {
                shift = mul(W::decoded_shift(unit), splat(-1.0f));
            } else if constexpr (F == Form::shifted) {
                shift = mul(s.shift[g], splat(-1.0f));
            }
            decode_words(w, 0, 8, kDecodesOtherwise ? 0 : kZero, s.step[g], shift,
                         F == Form::shifted || F == Form::span_shifted, group);
        }
        decode_stride<W, J + 1>(unit, n, s, out);
    }
}

// `blocks` blocks from `source` on.
template <class W>
void decode_blocks(const uint8_t* source, int64_t blocks, float* out) {
    constexpr int kColumns = 32 * W::kGroups;
    alignas(64) uint8_t unit[W::kUnitBytes];
    float lanes[kLanes * kColumns];
    for (; blocks > 0; blocks -= kBlockRows) {
        const int rows = blocks < kBlockRows ? static_cast<int>(blocks) : kBlockRows;
        source = mlxr::repack_blocks(W::kType, source, rows, unit);
        for (int part = 0; part < kParts && part * kLanes < rows; ++part) {
            Scales s;
            W::scales(Unit{unit, part}, s);
            for (int n = 0; n < W::kGroups / W::kStride; ++n) decode_stride<W, 0>(Unit{unit, part}, n, s, lanes);
            for (int lane = 0; lane < kLanes && part * kLanes + lane < rows; ++lane, out += kColumns) {
                for (int k = 0; k < kColumns; ++k) out[k] = lanes[kLanes * k + lane];
            }
        }
    }
}

// The same of numbers in E4M3, whose units are recoded. An f32 with the same exponent and fraction is 2**-120 of one.
template <class W>
void decode_float8(const uint8_t* source, int64_t blocks, float* out) {
    for (int64_t block = 0; block < blocks; ++block, out += mlxr::kFixedColumns) {
        float scale;
        memcpy(&scale, source, sizeof scale);
        source += sizeof scale;
        for (int i = 0; i < mlxr::kFixedColumns; ++i) {
            const uint32_t code = source[i], magnitude = code & 127u;
            const float value = __builtin_bit_cast(float, magnitude << 20) * 0x1p120f;
            const float found = magnitude == 127u ? __builtin_nanf("") : value;
            out[i] = scale * (code > 127u ? -found : found);
        }
        source += mlxr::kFixedColumns;
    }
}

// Of f16 none: its units are not its blocks.
template <class W>
constexpr auto find_decoder() -> void (*)(const uint8_t*, int64_t, float*) {
    if constexpr (W::kForm == Form::shorts) {
        return nullptr;
    } else if constexpr (W::kForm == Form::scaled_shorts) {
        return decode_float8<W>;
    } else {
        return decode_blocks<W>;
    }
}

}  // namespace
