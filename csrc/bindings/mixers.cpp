// The Python face of the recurrent mixers (mixers/mixers.h). Checks everything that an index or a length in the
// arguments could break, and that nobody writes a state that is read.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <string>

#include "bindings/checks.h"
#include "bindings/states.h"
#include "mixers/spread_mixers.h"

void bind_mixers(nb::module_& m);

namespace {

using OptionalVector = std::optional<Vector>;

// Columns of x from `first` on, of which there must be `count`.
const float* check_columns(const char* what, const Matrix& x, int64_t first, int64_t count) {
    if (first < 0 || first + count > size_of(x, 1)) {
        refuse(what, std::to_string(first), "0 to " + std::to_string(size_of(x, 1) - count));
    }
    return x.data() + first;
}

mlxr::ConvKind parse_conv(const std::string& kind) {
    if (kind == "plain") return mlxr::ConvKind::plain;
    if (kind == "silu") return mlxr::ConvKind::silu;
    if (kind != "gated") refuse("short_conv: kind", kind, "plain, silu or gated");
    return mlxr::ConvKind::gated;
}

void run_short_conv(Runtime& runtime, Matrix x, int64_t first, Matrix weight, OptionalVector bias, const char* kind,
                    MatrixOut out, MatrixOut pool, int64_t at, Ints reads, Ints writes, Ints starts) {
    const int64_t tokens = size_of(x, 0);
    mlxr::ShortConvCall call{};
    call.taps = size_of(weight, 0);
    call.channels = size_of(weight, 1);
    call.kind = parse_conv(kind);
    call.x = check_columns("short_conv: first column", x, first,
                           (call.kind == mlxr::ConvKind::gated ? 3 : 1) * call.channels);
    call.x_stride = size_of(x, 1);
    call.weight = weight.data();
    if (call.taps < 1) refuse("short_conv: taps", "0", "at least 1");
    if (bias) {
        check_size("short_conv: length of bias", size_of(*bias, 0), call.channels);
        call.bias = bias->data();
    }
    check_size("short_conv: rows of out", size_of(out, 0), tokens);
    check_size("short_conv: columns of out", size_of(out, 1), call.channels);
    call.out = out.data();
    call.states =
        check_states("short_conv", pool, at, (call.taps - 1) * call.channels, reads, writes, starts, tokens);
    run_alone(runtime, [&] { mlxr::spread_short_conv(runtime, call); });
}

// What both recurrences have in common, with q, k and v as one array in this order or another.
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

    void take_rates(const char* name, const Vector& rates, const Vector& bias) {
        prepare.decays = size_of(rates, 0);
        call.decay_rows = prepare.decays == call.value_heads ? 1 : call.rows;
        check_size(name, prepare.decays, call.value_heads * call.decay_rows);
        check_size(name, size_of(bias, 0), prepare.decays);
        prepare.rates = rates.data();
        prepare.bias = bias.data();
    }

    void take_states(const char* name, const MatrixOut& pool, int64_t at, const Ints& reads, const Ints& writes,
                     const Ints& starts, const MatrixOut& out) {
        const int64_t columns = call.value_heads * call.columns;
        call.states = check_states(name, pool, at, columns * call.rows, reads, writes, starts, size_of(out, 0));
        check_size(name, size_of(out, 1), columns);
        call.out = out.data();
    }
};

void run_gated_delta(Runtime& runtime, Matrix qkv, Matrix x, int64_t first, Vector rates, Vector bias,
                     int64_t key_heads, int64_t value_heads, int64_t rows, bool tiled, float eps, float scale,
                     MatrixOut out, MatrixOut pool, int64_t at, Ints reads, Ints writes, Ints starts) {
    if (value_heads < 1 || size_of(out, 1) % value_heads != 0) {
        refuse("gated_delta: columns of out", std::to_string(size_of(out, 1)), "a multiple of value_heads");
    }
    Recurrence rule("gated_delta", key_heads, value_heads, rows, size_of(out, 1) / value_heads);
    rule.take_rates("gated_delta: length of rates and bias", rates, bias);
    rule.take_states("gated_delta: columns of out", pool, at, reads, writes, starts, out);
    const int64_t keys = key_heads * rows;
    check_size("gated_delta: rows of qkv", size_of(qkv, 0), size_of(out, 0));
    check_size("gated_delta: rows of x", size_of(x, 0), size_of(out, 0));
    check_size("gated_delta: columns of qkv", size_of(qkv, 1), 2 * keys + size_of(out, 1));
    rule.prepare.heads = qkv.data();
    rule.prepare.heads_stride = rule.call.v_stride = size_of(qkv, 1);
    rule.prepare.scale = scale;
    rule.prepare.eps = eps;
    rule.call.v = qkv.data() + 2 * keys;
    rule.call.tiled = tiled;
    rule.prepare.betas = check_columns("gated_delta: first column", x, first, value_heads + rule.prepare.decays);
    rule.prepare.steps = rule.prepare.betas + value_heads;
    rule.prepare.betas_stride = rule.prepare.steps_stride = size_of(x, 1);
    run_alone(runtime, [&] { mlxr::spread_gated_delta(runtime, rule.prepare, rule.call); });
}

void run_mamba2(Runtime& runtime, Matrix xbc, Matrix x, int64_t first, Vector rates, Vector bias, Vector skip,
                int64_t groups, int64_t rows, MatrixOut out, MatrixOut pool, int64_t at, Ints reads, Ints writes,
                Ints starts) {
    const int64_t heads = size_of(skip, 0), inner = size_of(out, 1);
    if (heads < 1 || inner % heads != 0) {
        refuse("mamba2: columns of out", std::to_string(inner), "a multiple of the length of skip");
    }
    Recurrence rule("mamba2", groups, heads, rows, inner / heads);
    check_size("mamba2: length of rates", size_of(rates, 0), heads);
    rule.take_rates("mamba2: length of bias", rates, bias);
    rule.take_states("mamba2: columns of out", pool, at, reads, writes, starts, out);
    check_size("mamba2: rows of xbc", size_of(xbc, 0), size_of(out, 0));
    check_size("mamba2: rows of x", size_of(x, 0), size_of(out, 0));
    check_size("mamba2: columns of xbc", size_of(xbc, 1), inner + 2 * groups * rows);
    rule.call.v = xbc.data();
    rule.call.k = xbc.data() + inner;
    rule.call.q = rule.call.k + groups * rows;
    rule.call.v_stride = rule.call.k_stride = rule.call.q_stride = size_of(xbc, 1);
    rule.call.skip = skip.data();
    rule.prepare.steps = check_columns("mamba2: first column", x, first, heads);
    rule.prepare.steps_stride = size_of(x, 1);
    run_alone(runtime, [&] { mlxr::spread_mamba2(runtime, rule.prepare, rule.call); });
}

void run_gated_norm(Runtime& runtime, Matrix x, Matrix gate, int64_t first, Vector weight, int64_t width, float eps,
                    bool gate_first, MatrixOut out) {
    const int64_t rows = size_of(x, 0), columns = size_of(x, 1);
    if (width < 1 || columns % width != 0) {
        refuse("gated_norm: width", std::to_string(width), "a divisor of the columns of x");
    }
    const int64_t weights = size_of(weight, 0);
    check_size("gated_norm: length of weight", weights, weights == width ? width : columns);
    check_size("gated_norm: rows of gate", size_of(gate, 0), rows);
    check_size("gated_norm: rows of out", size_of(out, 0), rows);
    check_size("gated_norm: columns of out", size_of(out, 1), columns);
    const mlxr::GatedNormCall call{x.data(),
                                   check_columns("gated_norm: first column", gate, first, columns),
                                   size_of(gate, 1),
                                   weight.data(),
                                   out.data(),
                                   columns,
                                   width,
                                   weights,
                                   eps,
                                   gate_first};
    run_alone(runtime, [&] { mlxr::spread_gated_norm(runtime, call, rows); });
}

}  // namespace

void bind_mixers(nb::module_& m) {
    const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
    m.def("short_conv", &run_short_conv, nb::arg("runtime"), array("x"), nb::arg("first"), array("weight"),
          array("bias").none(), nb::arg("kind"), array("out"), array("pool"), nb::arg("at"), array("reads"),
          array("writes"), array("starts"));
    m.def("gated_delta", &run_gated_delta, nb::arg("runtime"), array("qkv"), array("x"), nb::arg("first"),
          array("rates"), array("bias"), nb::arg("key_heads"), nb::arg("value_heads"), nb::arg("rows"),
          nb::arg("tiled"), nb::arg("eps"), nb::arg("scale"), array("out"), array("pool"), nb::arg("at"),
          array("reads"), array("writes"), array("starts"));
    m.def("mamba2", &run_mamba2, nb::arg("runtime"), array("xbc"), array("x"), nb::arg("first"), array("rates"),
          array("bias"), array("skip"), nb::arg("groups"), nb::arg("rows"), array("out"), array("pool"), nb::arg("at"),
          array("reads"), array("writes"), array("starts"));
    m.def("gated_norm", &run_gated_norm, nb::arg("runtime"), array("x"), array("gate"), nb::arg("first"),
          array("weight"), nb::arg("width"), nb::arg("eps"), nb::arg("gate_first"), array("out"));
}
