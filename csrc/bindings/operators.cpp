// The Python face of the operators other than linear, embed and sample. Checks everything that an index or a length
// in the arguments could break (ValueError naming operator and argument), releases the GIL, locks the
// Runtime, and runs. The arrays must not be changed by other threads meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "attend/attend.h"
#include "bindings/checks.h"
#include "bindings/parts.h"
#include "layers/spread.h"

namespace nb = nanobind;

void bind_operators(nb::module_& m);

namespace {

// What norms have in common: rows of x, perhaps a residual, and what becomes of both.
struct NormArrays {
    const Matrix& x;
    const std::optional<Matrix>& residual;
    const MatrixOut& normed;
    const std::optional<MatrixOut>& summed;

    int64_t rows() const { return size_of(x, 0); }
    int64_t columns() const { return size_of(x, 1); }

    void check(const std::string& name) const {
        const auto check_shape = [&](const char* what, const auto& array) {
            if (size_of(array, 0) != rows() || size_of(array, 1) != columns()) {
                refuse(name + what, "not shaped as x", "its shape");
            }
        };
        check_shape(": normed", normed);
        if (residual) check_shape(": residual", *residual);
        if (summed) check_shape(": summed", *summed);
        if (residual.has_value() != summed.has_value()) refuse(name + ": summed", "alone", "given with residual");
    }
};

template <typename Array>
auto* data_or_null(const std::optional<Array>& array) {
    return array ? array->data() : nullptr;
}

void run_rms_norm(Runtime& runtime, Matrix x, OptionalVector weight, float eps, std::optional<Matrix> residual,
                  MatrixOut normed, std::optional<MatrixOut> summed, float residual_scale, float sum_scale) {
    const NormArrays arrays{x, residual, normed, summed};
    const int64_t weight_rows = weight ? size_of(*weight, 0) / std::max<int64_t>(1, arrays.columns()) : 1;
    if (weight) check_size("rms_norm: length of weight", size_of(*weight, 0), weight_rows * arrays.columns());
    if (weight_rows < 1) refuse("rms_norm: length of weight", "below that of a row", "one row or more");
    arrays.check("rms_norm");
    const mlxr::RmsNormCall call{x.data(),      data_or_null(residual), data_or_null(weight),
                                 normed.data(), data_or_null(summed),   arrays.columns(),
                                 eps,           residual_scale,         sum_scale,
                                 weight_rows};
    run_alone(runtime, [&] { mlxr::spread_rms_norm(runtime, call, arrays.rows()); });
}

void run_layer_norm(Runtime& runtime, Matrix x, Matrix weight, OptionalVector bias, float eps,
                    std::optional<Matrix> residual, MatrixOut normed, std::optional<MatrixOut> summed,
                    float residual_scale, float sum_scale) {
    const NormArrays arrays{x, residual, normed, summed};
    check_size("layer_norm: columns of weight", size_of(weight, 1), arrays.columns());
    if (size_of(weight, 0) < 1) refuse("layer_norm: rows of weight", "0", "at least 1");
    if (bias) check_size("layer_norm: length of bias", size_of(*bias, 0), arrays.columns());
    arrays.check("layer_norm");
    const mlxr::LayerNormCall call{x.data(),          data_or_null(residual),
                                   weight.data(),     data_or_null(bias),
                                   normed.data(),     data_or_null(summed),
                                   arrays.columns(),  eps,
                                   residual_scale,    sum_scale,
                                   size_of(weight, 0)};
    run_alone(runtime, [&] { mlxr::spread_layer_norm(runtime, call, arrays.rows()); });
}

void run_rope(Runtime& runtime, HeadsOut x, Ints positions, Matrix cosines, Matrix sines, bool interleaved,
              OptionalVector factors) {
    const int64_t tokens = size_of(x, 0);
    mlxr::RopeCall call = check_rope(positions, cosines, sines, interleaved, tokens, size_of(x, 2));
    call.x = x.data();
    call.token_stride = token_stride_of("rope: x", x);
    call.heads = size_of(x, 1);
    if (factors) {
        check_size("rope: length of factors", size_of(*factors, 0), size_of(cosines, 0));
        call.factors = factors->data();
    }
    run_alone(runtime, [&] { mlxr::spread_rope(runtime, call, tokens); });
}

// What multiplies is the second half of x where this is gated, else columns of `up` from `first` on, or nothing.
void run_activate(Runtime& runtime, Matrix x, const char* kind, MatrixOut out, bool gated, std::optional<Matrix> up,
                  int64_t first, const std::vector<float>& parameters) {
    const int64_t rows = size_of(out, 0), columns = size_of(out, 1), x_columns = (gated ? 2 : 1) * columns;
    check_size("activate: rows of gate_up", size_of(x, 0), rows);
    check_size("activate: columns of gate_up", size_of(x, 1), x_columns);
    mlxr::ActivateCall call{x.data(),  nullptr, out.data(), columns,
                            x_columns, 0,       columns,    parse_activation("activate: kind", kind)};
    call.parameters = check_parameters("activate: number of parameters", call.kind, parameters);
    if (gated) {
        if (up) refuse("activate: up", "given", "None, as x is gated");
        call.up = x.data() + columns;
        call.up_stride = x_columns;
    } else if (up) {
        check_size("activate: rows of up", size_of(*up, 0), rows);
        if (first < 0 || first + columns > size_of(*up, 1)) {
            refuse("activate: first", std::to_string(first),
                   "so that " + std::to_string(columns) + " columns of up follow");
        }
        call.up = up->data() + first;
        call.up_stride = size_of(*up, 1);
    } else if (call.kind == mlxr::Activation::clamped_swiglu) {
        refuse("activate: kind", kind, "a kind without a gate");
    }
    run_alone(runtime, [&] { mlxr::spread_activate(runtime, call, rows); });
}

void run_scale(Runtime& runtime, Matrix x, float factor, float softcap, MatrixOut out) {
    check_size("scale: rows of out", size_of(out, 0), size_of(x, 0));
    check_size("scale: columns of out", size_of(out, 1), size_of(x, 1));
    const mlxr::ScaleCall call{x.data(), out.data(), factor, check_softcap("scale: softcap", softcap)};
    run_alone(runtime, [&] { mlxr::spread_scale(runtime, call, static_cast<int64_t>(x.size())); });
}

void run_add(Runtime& runtime, Matrix x, Matrix other, float factor, MatrixOut out) {
    for (const size_t axis : {0, 1}) {
        check_size("add: shape of other", size_of(other, axis), size_of(x, axis));
        check_size("add: shape of out", size_of(out, axis), size_of(x, axis));
    }
    const mlxr::AddCall call{x.data(), other.data(), out.data(), factor};
    run_alone(runtime, [&] { mlxr::spread_add(runtime, call, static_cast<int64_t>(x.size())); });
}

void run_gate_heads(Runtime& runtime, Matrix x, Matrix gates, MatrixOut out, bool softplus) {
    const int64_t rows = size_of(x, 0), columns = size_of(x, 1), count = size_of(gates, 1);
    check_size("gate_heads: rows of gates", size_of(gates, 0), rows);
    check_size("gate_heads: rows of out", size_of(out, 0), rows);
    check_size("gate_heads: columns of out", size_of(out, 1), columns);
    if (count < 1 || columns % count != 0) {
        refuse("gate_heads: columns of gates", std::to_string(count),
               "a divisor of the " + std::to_string(columns) + " columns of x");
    }
    const mlxr::GateHeadsCall call{x.data(), gates.data(), out.data(), columns, count, softplus};
    run_alone(runtime, [&] { mlxr::spread_gate_heads(runtime, call, rows); });
}

// Rows of `streams` parts as wide as those of `part`.
void check_streams(const char* what, const Matrix& x, int64_t rows, int64_t streams, int64_t columns) {
    if (streams < 1) refuse(what, std::to_string(streams), "1 stream or more");
    check_size(what, size_of(x, 0), rows);
    check_size(what, size_of(x, 1), streams * columns);
}

void run_mix_streams(Runtime& runtime, Matrix x, Matrix gates, int64_t streams, MatrixOut out) {
    const int64_t rows = size_of(out, 0), columns = size_of(out, 1);
    check_streams("mix_streams: shape of x", x, rows, streams, columns);
    check_streams("mix_streams: shape of gates", gates, rows, streams, columns);
    const mlxr::MixStreamsCall call{x.data(), gates.data(), out.data(), streams, columns};
    run_alone(runtime, [&] { mlxr::run_streams(runtime, call, rows); });
}

void run_spread_streams(Runtime& runtime, Matrix x, std::optional<Matrix> gates, std::optional<Matrix> base,
                        int64_t streams, float factor, float gate_scale, MatrixOut out) {
    const int64_t rows = size_of(x, 0), columns = size_of(x, 1);
    check_size("spread_streams: rows of out", size_of(out, 0), rows);
    check_size("spread_streams: columns of out", size_of(out, 1), streams * columns);
    if (gates) check_streams("spread_streams: shape of gates", *gates, rows, streams, 1);
    if (base) check_streams("spread_streams: shape of base", *base, rows, streams, columns);
    const mlxr::SpreadStreamsCall call{x.data(), data_or_null(gates), data_or_null(base), out.data(), streams, columns,
                                       factor,   gate_scale};
    run_alone(runtime, [&] { mlxr::run_streams(runtime, call, rows); });
}

void run_match_streams(Runtime& runtime, Matrix keys, Matrix queries, float scale, float least, MatrixOut out) {
    const int64_t rows = size_of(out, 0), streams = size_of(out, 1);
    const int64_t columns = size_of(keys, 1) / std::max<int64_t>(1, streams);
    check_streams("match_streams: shape of keys", keys, rows, streams, columns);
    check_streams("match_streams: shape of queries", queries, rows, streams, columns);
    const mlxr::MatchStreamsCall call{keys.data(), queries.data(), out.data(), streams, columns, scale, least};
    run_alone(runtime, [&] { mlxr::run_streams(runtime, call, rows); });
}

void run_balance_streams(Runtime& runtime, Matrix x, Vector scale, Vector base, int64_t streams, int64_t turns,
                         float eps, MatrixOut out) {
    mlxr::BalanceStreamsCall call = check_balance("balance_streams", streams, scale, base, turns, eps);
    check_streams("balance_streams: shape of x", x, size_of(out, 0), streams, call.columns);
    check_size("balance_streams: columns of out", size_of(out, 1), streams * call.columns);
    call.x = x.data();
    call.out = out.data();
    run_alone(runtime, [&] { mlxr::run_streams(runtime, call, size_of(out, 0)); });
}

void run_blend_streams(Runtime& runtime, Matrix x, std::optional<Matrix> gains, std::optional<Matrix> added,
                       int64_t streams, MatrixOut out) {
    check_between("blend_streams: streams", streams, 1, mlxr::kMostStreams);
    const int64_t rows = size_of(out, 0), columns = size_of(out, 1) / (added ? streams : 1);
    check_streams("blend_streams: shape of x", x, rows, streams, columns);
    if (added) check_streams("blend_streams: shape of added", *added, rows, 1, columns);
    if (gains) check_streams("blend_streams: shape of gains", *gains, rows, streams, 2 + streams);
    if (added && !gains) refuse("blend_streams: gains", "None", "given where something is added");
    check_size("blend_streams: columns of out", size_of(out, 1), (added ? streams : 1) * columns);
    const mlxr::BlendStreamsCall call{x.data(), data_or_null(gains), data_or_null(added), out.data(), streams, columns};
    run_alone(runtime, [&] { mlxr::run_streams(runtime, call, rows); });
}

void run_hadamard(Runtime& runtime, Matrix x, OptionalVector signs, std::optional<Ints> order, int64_t block,
                  bool inverse, MatrixOut out) {
    const int64_t rows = size_of(x, 0), columns = size_of(x, 1);
    check_size("hadamard: rows of out", size_of(out, 0), rows);
    check_size("hadamard: columns of out", size_of(out, 1), columns);
    mlxr::HadamardCall call = mlxr::check_hadamard(columns, signs, order, block, inverse);
    call.x = x.data();
    call.out = out.data();
    run_alone(runtime, [&] { mlxr::spread_hadamard(runtime, call, rows); });
}

void run_level_streams(Runtime& runtime, Matrix x, Matrix base, int64_t streams, float least, MatrixOut out) {
    const int64_t rows = size_of(base, 0), columns = size_of(base, 1);
    check_streams("level_streams: shape of x", x, rows, streams, columns);
    check_size("level_streams: rows of out", size_of(out, 0), rows);
    check_size("level_streams: columns of out", size_of(out, 1), streams * columns);
    const mlxr::LevelStreamsCall call{x.data(), base.data(), out.data(), streams, columns, least};
    run_alone(runtime, [&] { mlxr::run_streams(runtime, call, rows); });
}

// The first `columns` of x; the others of `out` stay as they are.
void run_cut_gates(Runtime& runtime, Matrix x, int64_t columns, float factor, MatrixOut out) {
    check_between("cut_gates: columns", columns, 1, size_of(x, 1));
    check_size("cut_gates: rows of out", size_of(out, 0), size_of(x, 0));
    check_size("cut_gates: columns of out", size_of(out, 1), size_of(x, 1));
    const mlxr::CutGatesCall call{x.data(), size_of(x, 1), out.data(), columns, factor};
    run_alone(runtime, [&] { mlxr::spread_cut_gates(runtime, call, size_of(x, 0)); });
}

// Without v values are in keys, and v_pool is not written.
void run_write_pages(Runtime& runtime, Heads k, std::optional<Heads> v, PoolOut k_pool, PoolOut v_pool, Ints slots) {
    mlxr::WritePagesCall keys = check_write(k_pool, v_pool, slots, size_of(k, 0)), values = keys;
    const auto take_rows = [&](const char* what, const Heads& rows, mlxr::WritePagesCall& call) {
        check_size("write_pages: tokens of k and v", size_of(rows, 0), keys.tokens);
        check_size("write_pages: heads of k and v", size_of(rows, 1), keys.kv_heads);
        check_size("write_pages: head_dim of k and v", size_of(rows, 2), keys.head_dim);
        call.rows = rows.data();
        call.token_stride = token_stride_of(what, rows);
    };
    take_rows("write_pages: k", k, keys);
    if (v) take_rows("write_pages: v", *v, values);
    values.pool = v_pool.data();
    values.values = true;
    run_alone(runtime, [&] { mlxr::spread_write_pages(runtime, keys, v ? &values : nullptr); });
}

// Part i of each row of x times weight i, see PartsProduct.
void run_project_parts(Runtime& runtime, Matrix x, const nb::tuple& weights, int64_t passed, MatrixOut out) {
    const std::vector<const mlxr::LinearWeight*> parts = mlxr::check_parts(weights, passed, size_of(x, 1));
    const int64_t tokens = size_of(x, 0), columns = passed + parts[0]->out_features();
    check_size("project_parts: rows of out", size_of(out, 0), tokens);
    check_size("project_parts: columns of out", size_of(out, 1), static_cast<int64_t>(parts.size()) * columns);
    run_alone(runtime, [&] { mlxr::multiply_parts(runtime, {parts, x.data(), out.data(), tokens, passed}); });
}

void run_attend(Runtime& runtime, Heads q, Pool k_pool, Pool v_pool, Ints query_starts, Ints context_lengths,
                IntMatrix page_table, float scale, int64_t window, MatrixOut out, float softcap, OptionalVector sinks,
                bool symmetric, int64_t value_dim, std::optional<Ints> ends, OptionalVector biases, bool chunked) {
    const int64_t tokens = size_of(q, 0);
    mlxr::AttendCall call = check_attend(k_pool, v_pool, query_starts, context_lengths, page_table, tokens,
                                         size_of(q, 1), scale, window, value_dim);
    call.q = q.data();
    call.q_stride = token_stride_of("attend: q", q);
    call.out = out.data();
    call.symmetric = symmetric;
    call.chunked = chunked && window > 0;
    if (ends) call.ends = check_ends(*ends, query_starts, context_lengths);
    call.softcap = check_softcap("attend: softcap", softcap);
    if (sinks) {
        check_size("attend: length of sinks", size_of(*sinks, 0), call.heads);
        call.sinks = sinks->data();
    }
    call.biases = biases ? biases->data() : nullptr;
    call.bias_span = check_biases("attend: length of biases", biases, call.heads);
    check_size("attend: head_dim of q", size_of(q, 2), call.head_dim);
    check_size("attend: rows of out", size_of(out, 0), tokens);
    check_size("attend: columns of out", size_of(out, 1), call.heads * call.value_dim);
    run_alone(runtime,
              [&] { mlxr::run_attend(runtime, call, mlxr::plan_attend(runtime, call, size_of(context_lengths, 0))); });
}

}  // namespace

void bind_operators(nb::module_& m) {
    // No conversions: an array of another type or layout is refused, never copied.
    const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
    m.def("rms_norm", &run_rms_norm, nb::arg("runtime"), array("x"), array("weight").none(), nb::arg("eps"),
          array("residual").none(), array("normed"), array("summed").none(), nb::arg("residual_scale") = 1.0f,
          nb::arg("sum_scale") = 1.0f);
    m.def("layer_norm", &run_layer_norm, nb::arg("runtime"), array("x"), array("weight"), array("bias").none(),
          nb::arg("eps"), array("residual").none(), array("normed"), array("summed").none(),
          nb::arg("residual_scale") = 1.0f, nb::arg("sum_scale") = 1.0f);
    m.def("rope", &run_rope, nb::arg("runtime"), array("x"), array("positions"), array("cos"), array("sin"),
          nb::arg("interleaved"), array("factors").none() = nb::none());
    m.def("activate", &run_activate, nb::arg("runtime"), array("gate_up"), nb::arg("kind"), array("out"),
          nb::arg("gated") = true, array("up").none() = nb::none(), nb::arg("first") = 0,
          nb::arg("parameters") = std::vector<float>());
    m.def("scale", &run_scale, nb::arg("runtime"), array("x"), nb::arg("factor"), nb::arg("softcap"), array("out"));
    m.def("add", &run_add, nb::arg("runtime"), array("x"), array("other"), nb::arg("factor"), array("out"));
    m.def("gate_heads", &run_gate_heads, nb::arg("runtime"), array("x"), array("gates"), array("out"),
          nb::arg("softplus") = false);
    m.def("mix_streams", &run_mix_streams, nb::arg("runtime"), array("x"), array("gates"), nb::arg("streams"),
          array("out"));
    m.def("spread_streams", &run_spread_streams, nb::arg("runtime"), array("x"), array("gates").none(),
          array("base").none(), nb::arg("streams"), nb::arg("factor"), nb::arg("gate_scale"), array("out"));
    m.def("match_streams", &run_match_streams, nb::arg("runtime"), array("keys"), array("queries"), nb::arg("scale"),
          nb::arg("least"), array("out"));
    m.def("balance_streams", &run_balance_streams, nb::arg("runtime"), array("x"), array("scale"), array("base"),
          nb::arg("streams"), nb::arg("turns"), nb::arg("eps"), array("out"));
    m.def("level_streams", &run_level_streams, nb::arg("runtime"), array("x"), array("base"), nb::arg("streams"),
          nb::arg("least"), array("out"));
    m.def("cut_gates", &run_cut_gates, nb::arg("runtime"), array("x"), nb::arg("columns"), nb::arg("factor"),
          array("out"));
    m.def("blend_streams", &run_blend_streams, nb::arg("runtime"), array("x"), array("gains").none(),
          array("added").none(), nb::arg("streams"), array("out"));
    m.def("hadamard", &run_hadamard, nb::arg("runtime"), array("x"), array("signs").none(), array("order").none(),
          nb::arg("block"), nb::arg("inverse"), array("out"));
    m.def("project_parts", &run_project_parts, nb::arg("runtime"), array("x"), nb::arg("weights"), nb::arg("passed"),
          array("out"));
    m.def("write_pages", &run_write_pages, nb::arg("runtime"), array("k"), array("v").none(), array("k_pool"),
          array("v_pool"), array("slots"));
    m.def("attend", &run_attend, nb::arg("runtime"), array("q"), array("k_pool"), array("v_pool"),
          array("query_starts"), array("context_lengths"), array("page_table"), nb::arg("scale"), nb::arg("window"),
          array("out"), nb::arg("softcap") = 0.0f, array("sinks").none() = nb::none(), nb::arg("symmetric") = false,
          nb::arg("value_dim") = 0, array("ends").none() = nb::none(), array("biases").none() = nb::none(),
          nb::arg("chunked") = false);
}
