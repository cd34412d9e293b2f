// The numbers of recurrent mixers, checked: calls that are complete but for the arrays of a batch.
#pragma once

#include <nanobind/stl/optional.h>

#include <optional>

#include "bindings/checks.h"
#include "bindings/states.h"
#include "mixers/mixers.h"

namespace {

inline mlxr::ConvKind parse_conv(const std::string& kind) {
    if (kind == "plain") return mlxr::ConvKind::plain;
    if (kind == "silu") return mlxr::ConvKind::silu;
    if (kind != "gated") refuse("short_conv: kind", kind, "plain, silu or gated");
    return mlxr::ConvKind::gated;
}

inline int64_t conv_inputs(const mlxr::ShortConvCall& call) {
    return (call.kind == mlxr::ConvKind::gated ? 3 : 1) * call.channels;
}

inline int64_t conv_state_floats(const mlxr::ShortConvCall& call) {
    return (call.taps - 1) * call.channels;
}

inline mlxr::ShortConvCall check_conv(const Matrix& weight, const OptionalVector& bias, const char* kind) {
    mlxr::ShortConvCall call{};
    call.taps = size_of(weight, 0);
    call.channels = size_of(weight, 1);
    call.kind = parse_conv(kind);
    call.weight = weight.data();
    if (call.taps < 1) refuse("short_conv: taps", "0", "at least 1");
    if (bias) {
        check_size("short_conv: length of bias", size_of(*bias, 0), call.channels);
        call.bias = bias->data();
    }
    return call;
}

// What both recurrences have in common.
struct Recurrence {
    mlxr::PrepareRecurrenceCall prepare{};
    mlxr::RecurrenceCall call{};

    Recurrence(const char* name, int64_t key_heads, int64_t value_heads, int64_t rows, int64_t columns) {
        if (key_heads < 1 || value_heads < 1 || rows < 1 || columns < 1 || value_heads % key_heads != 0) {
            refuse(std::string(name) + ": value_heads", std::to_string(value_heads),
                   "a multiple of the " + std::to_string(key_heads) + " key heads, which are not empty");
        }
        call.key_heads = prepare.key_heads = key_heads;
        call.value_heads = prepare.value_heads = value_heads;
        call.rows = prepare.rows = rows;
        call.columns = columns;
    }

    int64_t out_columns() const { return call.value_heads * call.columns; }
    int64_t columns() const { return 2 * call.key_heads * call.rows + out_columns(); }
    int64_t state_floats() const { return mlxr::recurrence_state_floats(call); }

    void take_rates(const char* name, const Vector& rates, const Vector& bias) {
        prepare.decays = size_of(rates, 0);
        call.decay_rows = prepare.decays == call.value_heads ? 1 : call.rows;
        check_size(name, prepare.decays, call.value_heads * call.decay_rows);
        check_size(name, size_of(bias, 0), prepare.decays);
        prepare.rates = rates.data();
        prepare.bias = bias.data();
    }

    void take_lengths(float eps, float scale, float bound) {
        if (!(bound <= 0 && bound >= -1e30f))
            refuse("gated_delta: bound", std::to_string(bound), "below 0, or 0 for none");
        prepare.eps = eps;
        prepare.scale = scale;
        prepare.bound = bound;
    }
};

// The numbers of a scan.
inline mlxr::ScanCall check_scan(const Matrix& rates, const Vector& skip) {
    mlxr::ScanCall call{};
    call.rows = size_of(rates, 0);
    call.channels = size_of(rates, 1);
    if (call.rows < 1 || call.channels < 1) refuse("scan: rates", "empty", "some of each channel");
    check_size("scan: length of skip", size_of(skip, 0), call.channels);
    call.rates = rates.data();
    call.skip = skip.data();
    return call;
}

// Without a weight there is no norm.
inline mlxr::GatedNormCall check_gated_norm(const OptionalVector& weight, int64_t columns, int64_t width, float eps,
                                            bool gate_first) {
    if (width < 1 || columns % width != 0) {
        refuse("gated_norm: width", std::to_string(width), "a divisor of the columns of x");
    }
    const int64_t weights = weight ? size_of(*weight, 0) : columns;
    check_size("gated_norm: length of weight", weights, weights == width ? width : columns);
    mlxr::GatedNormCall call{};
    call.weight = weight ? weight->data() : nullptr;
    call.columns = columns;
    call.width = width;
    call.weight_columns = weights;
    call.eps = eps;
    call.gate_first = gate_first;
    return call;
}

}  // namespace
