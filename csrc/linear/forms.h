// The forms of quantised types, and what a product of each form has beside its dot products.
//
// A weight of a row is, by the type's form, with q the unsigned byte and z the type's zero point:
//   plain         step * (q - z)
//   shifted       step * q - shift
//   halved        step * (q - z)                 a step for 16 columns
//   span          step * (q - z)
//   span_shifted  step * q + least * min         min: integer, one for 32 columns; least is not positive
//   fine          step * fine * (q - z)          fine: integer, one for 16 columns
//   fine_shifted  step * fine * q + least * min  likewise, min for 16 columns
//   long_fine     step * fine * (q - z)          likewise, of bytes whose sums of 16 products may take 17 bits or more
//   shorts        2**(exponent - 24) * q         q: 16 bits with sign, and so is the activation
//   scaled_shorts 2**-24 * step * q              likewise
// Units of the forms from span to long_fine are spans of 256 columns, whose activations have one scale: their
// groups are summed up by themselves, the minimums, and all of fine forms, as integers.
#pragma once

#include "linear/lanes.h"
#include "runtime/kernel_table.h"

namespace {

enum class Form { plain, shifted, halved, span, span_shifted, fine, fine_shifted, long_fine, shorts, scaled_shorts };

constexpr bool is_short(Form form) {
    return form == Form::shorts || form == Form::scaled_shorts;
}
constexpr bool has_spans(Form form) {
    return form != Form::plain && form != Form::shifted && form != Form::halved && !is_short(form);
}
constexpr bool is_fine(Form form) {
    return form == Form::fine || form == Form::fine_shifted || form == Form::long_fine;
}
// Pairs of minimums in a span.
constexpr int min_pairs(Form form) {
    return form == Form::span_shifted ? 4 : form == Form::fine_shifted ? 8 : 0;
}

// What groups are summed up in.
template <Form F>
struct TotalOf {
    using Type = Floats;
};
template <>
struct TotalOf<Form::fine> {
    using Type = Ints;
};
template <>
struct TotalOf<Form::fine_shifted> {
    using Type = Ints;
};
template <>
struct TotalOf<Form::long_fine> {
    using Type = Ints;
};
template <Form F>
using Total = typename TotalOf<F>::Type;

constexpr int kShortWords = 16;  // words of a group of 32 shorts

// Where the sum of a group begins: minus its zero point times the sum of its activations, for item `item`.
template <bool Wide, int Zero>
MLXR_INLINE Ints start_group(const mlxr::Activations& a, int64_t item) {
    if constexpr (Zero < 0) {
        return splat(0);
    } else {
        return start_sum<Wide>(a.zeros[Zero] + item);
    }
}

// A group of a fine form has two sums, of 16 columns each, which fit into 16 bits (quantize.h). They share a lane: the
// first one above, and the second, biased so that it borrows nothing, below. add_halves takes the bias away and adds
// both times their scales: one multiplication, and no conversion, for 32 columns. Of long_fine and halved each is
// multiplied alone.
template <Form F, bool Wide, int Zero>
MLXR_INLINE Ints start_second_half(const mlxr::Activations& a, int64_t item) {
    constexpr bool kIsLong = F == Form::long_fine || F == Form::halved;
    if constexpr (Zero < 0) {
        return splat(kIsLong ? 0 : mlxr::kSecondHalf);
    } else {
        const Ints start = start_sum<Wide>(a.zeros[Zero] + item);  // which has the bias where it is read
        return kIsLong && !(kSignedWide && Wide) ? add(start, splat(-mlxr::kSecondHalf)) : start;
    }
}
MLXR_INLINE Ints join_halves(Ints first, Ints second) {
    return add(shift_left(first, 16), second);
}
MLXR_INLINE Ints add_joined(Ints sum, Ints halves, Ints fine) {
    return dot_shorts(sum, fine, bits_xor(halves, splat(mlxr::kSecondHalf)));
}
// The scale of a group's first or second half.
MLXR_INLINE Ints upper_half(Ints pair) {
    return shift_right_signed(pair, 16);
}
MLXR_INLINE Ints lower_half(Ints pair) {
    return shift_right_signed(shift_left(pair, 16), 16);
}
template <Form F>
MLXR_INLINE Ints add_halves(Ints sum, Ints first, Ints second, Ints fine) {
    if constexpr (F == Form::long_fine) {
        return add(sum, add(mul(first, upper_half(fine)), mul(second, lower_half(fine))));
    } else {
        return add_joined(sum, join_halves(first, second), fine);
    }
}

// The sum of a span's minimums, which `min` gives pair by pair, in units of its activations' scale.
template <Form F, class Min>
MLXR_INLINE Floats sum_mins(const mlxr::Activations& a, int64_t span, Floats least, const Min& min) {
    if constexpr (min_pairs(F) == 0) {
        return splat(0.0f);
    } else {
        const int16_t* const sums = is_fine(F) ? a.half_sums + 16 * span : a.sums + 8 * span;
        Ints sum = splat(0);
        repeat<min_pairs(F)>([&](int i) MLXR_BODY { sum = dot_shorts(sum, min(i), spread(sums + 2 * i)); });
        return mul(least, to_floats(sum));
    }
}

// Where the sum of a span begins, and where it ends, in units of its activations' scale: floats begin at the minimums,
// integers get their step and the minimums at the end.
template <Form F>
MLXR_INLINE Total<F> start_span(Floats mins) {
    if constexpr (is_fine(F)) {
        return splat(0);
    } else {
        return mins;
    }
}
template <Form F>
MLXR_INLINE Floats end_span(Total<F> total, Floats step, Floats mins) {
    if constexpr (is_fine(F)) {
        return fma(step, to_floats(total), mins);
    } else {
        return total;
    }
}

// total + the sum of a group of shorts times its scales. The power of two is added to the exponent of the sum, which no
// multiplying port has to do; an exact zero thereby counts as 2**-127 of the smallest product there is. The
// activation's scale has the factor 2**-24.
MLXR_INLINE Floats add_short_sum(Ints sum, Ints exponent, float scale, Floats total) {
    return fma(splat(scale), as_floats(add(as_ints(to_floats(sum)), exponent)), total);
}

// total + a sum of integers times the step of the weights and the scale of the activations.
MLXR_INLINE Floats add_scaled(Ints sum, Floats step, float scale, Floats total) {
    return fma(mul(step, splat(scale)), to_floats(sum), total);
}

}  // namespace
