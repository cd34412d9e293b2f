// The Python face of the recurrent mixers (mixers/mixers.h). Checks everything that an index or a length in the
// arguments could break, and that nobody writes a state that is read.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings/embed.h"
#include "bindings/mixers.h"
#include "embed/embed.h"
#include "mixers/spread_mixers.h"

void bind_mixers(nb::module_& m);

namespace {

// Columns of x from `first` on, of which there must be `count`.
const float* check_columns(const char* what, const Matrix& x, int64_t first, int64_t count) {
    if (first < 0 || first + count > size_of(x, 1)) {
        refuse(what, std::to_string(first), "0 to " + std::to_string(size_of(x, 1) - count));
    }
    return x.data() + first;
}

void run_short_conv(Runtime& runtime, Matrix x, int64_t first, Matrix weight, OptionalVector bias, const char* kind,
                    MatrixOut out, MatrixOut pool, int64_t at, Ints reads, Ints writes, Ints starts) {
    const int64_t tokens = size_of(x, 0);
    mlxr::ShortConvCall call = check_conv(weight, bias, kind);
    call.x = check_columns("short_conv: first column", x, first, conv_inputs(call));
    call.x_stride = size_of(x, 1);
    check_size("short_conv: rows of out", size_of(out, 0), tokens);
    check_size("short_conv: columns of out", size_of(out, 1), call.channels);
    call.out = out.data();
    call.states = check_states("short_conv", pool, at, conv_state_floats(call), reads, writes, starts, tokens);
    run_alone(runtime, [&] { mlxr::spread_short_conv(runtime, call); });
}

// Value heads and the columns of each, which `out` has together.
int64_t columns_of_head(const char* what, const MatrixOut& out, int64_t heads) {
    if (heads < 1 || size_of(out, 1) % heads != 0) {
        refuse(what, std::to_string(size_of(out, 1)), "a multiple of " + std::to_string(heads) + " heads");
    }
    return size_of(out, 1) / heads;
}

void run_gated_delta(Runtime& runtime, Matrix qkv, Matrix x, int64_t first, Vector rates, Vector bias,
                     int64_t key_heads, int64_t value_heads, int64_t rows, bool tiled, float eps, float scale,
                     float bound, MatrixOut out, MatrixOut pool, int64_t at, Ints reads, Ints writes, Ints starts) {
    const int64_t tokens = size_of(out, 0);
    Recurrence rule("gated_delta", key_heads, value_heads, rows,
                    columns_of_head("gated_delta: columns of out", out, value_heads));
    rule.take_rates("gated_delta: length of rates and bias", rates, bias);
    rule.take_lengths(eps, scale, bound);
    check_size("gated_delta: rows of qkv", size_of(qkv, 0), tokens);
    check_size("gated_delta: rows of x", size_of(x, 0), tokens);
    check_size("gated_delta: columns of qkv", size_of(qkv, 1), rule.columns());
    rule.prepare.heads = qkv.data();
    rule.prepare.heads_stride = rule.call.v_stride = size_of(qkv, 1);
    rule.call.v = qkv.data() + 2 * key_heads * rows;
    rule.call.tiled = tiled;
    rule.call.out = out.data();
    rule.prepare.betas = check_columns("gated_delta: first column", x, first, value_heads + rule.prepare.decays);
    rule.prepare.steps = rule.prepare.betas + value_heads;
    rule.prepare.betas_stride = rule.prepare.steps_stride = size_of(x, 1);
    rule.call.states = check_states("gated_delta", pool, at, rule.state_floats(), reads, writes, starts, tokens);
    run_alone(runtime, [&] { mlxr::spread_gated_delta(runtime, rule.prepare, rule.call); });
}

void run_mamba2(Runtime& runtime, Matrix xbc, Matrix x, int64_t first, Vector rates, Vector bias, Vector skip,
                int64_t groups, int64_t rows, MatrixOut out, MatrixOut pool, int64_t at, Ints reads, Ints writes,
                Ints starts) {
    const int64_t heads = size_of(skip, 0), inner = size_of(out, 1), tokens = size_of(out, 0);
    Recurrence rule("mamba2", groups, heads, rows, columns_of_head("mamba2: columns of out", out, heads));
    check_size("mamba2: length of rates", size_of(rates, 0), heads);
    rule.take_rates("mamba2: length of bias", rates, bias);
    check_size("mamba2: rows of xbc", size_of(xbc, 0), tokens);
    check_size("mamba2: rows of x", size_of(x, 0), tokens);
    check_size("mamba2: columns of xbc", size_of(xbc, 1), rule.columns());
    rule.call.v = xbc.data();
    rule.call.k = xbc.data() + inner;
    rule.call.q = rule.call.k + groups * rows;
    rule.call.v_stride = rule.call.k_stride = rule.call.q_stride = size_of(xbc, 1);
    rule.call.skip = skip.data();
    rule.call.out = out.data();
    rule.prepare.steps = check_columns("mamba2: first column", x, first, heads);
    rule.prepare.steps_stride = size_of(x, 1);
    rule.call.states = check_states("mamba2", pool, at, rule.state_floats(), reads, writes, starts, tokens);
    run_alone(runtime, [&] { mlxr::spread_mamba2(runtime, rule.prepare, rule.call); });
}

void run_scan(Runtime& runtime, Matrix u, Matrix steps, Matrix bc, Matrix rates, Vector skip, MatrixOut out,
              MatrixOut pool, int64_t at, Ints reads, Ints writes, Ints starts) {
    const int64_t tokens = size_of(out, 0);
    mlxr::ScanCall call = check_scan(rates, skip);
    for (const Matrix* each : {&u, &steps, &bc}) check_size("scan: rows of u, steps or bc", size_of(*each, 0), tokens);
    for (const Matrix* each : {&u, &steps}) {
        check_size("scan: columns of u or steps", size_of(*each, 1), call.channels);
    }
    check_size("scan: columns of bc", size_of(bc, 1), 2 * call.rows);
    check_size("scan: columns of out", size_of(out, 1), call.channels);
    call.u = u.data();
    call.steps = steps.data();
    call.b = bc.data();
    call.c = call.b + call.rows;
    call.bc_stride = size_of(bc, 1);
    call.out = out.data();
    call.states = check_states("scan", pool, at, call.rows * call.channels, reads, writes, starts, tokens);
    run_alone(runtime, [&] { mlxr::spread_scan(runtime, call); });
}

void run_gated_norm(Runtime& runtime, Matrix x, Matrix gate, int64_t first, OptionalVector weight, int64_t width,
                    float eps, bool gate_first, MatrixOut out) {
    const int64_t rows = size_of(x, 0), columns = size_of(x, 1);
    mlxr::GatedNormCall call = check_gated_norm(weight, columns, width, eps, gate_first);
    check_size("gated_norm: rows of gate", size_of(gate, 0), rows);
    check_size("gated_norm: rows of out", size_of(out, 0), rows);
    check_size("gated_norm: columns of out", size_of(out, 1), columns);
    call.x = x.data();
    call.gate = check_columns("gated_norm: first column", gate, first, columns);
    call.gate_stride = size_of(gate, 1);
    call.out = out.data();
    run_alone(runtime, [&] { mlxr::spread_gated_norm(runtime, call, rows); });
}

// The rows of a table that tokens name by themselves and by those before them: out (tokens, heads * columns).
void run_ngrams(Runtime& runtime, mlxr::TokenIds ids, const std::string& type, mlxr::RawBlocks data, int64_t columns,
                int64_t end, const std::vector<uint64_t>& multipliers, const std::vector<uint64_t>& sizes,
                const std::vector<uint64_t>& offsets, MatrixOut out, MatrixOut pool, int64_t at, Ints reads,
                Ints writes, Ints starts) {
    const int64_t tokens = size_of(out, 0);
    check_size("ngrams: length of ids", static_cast<int64_t>(ids.size()), tokens);
    const mlxr::Type table = mlxr::check_table(type, data, static_cast<size_t>(columns));
    const size_t known = mlxr::count_rows(table, data, static_cast<size_t>(columns));
    mlxr::NgramCall call = mlxr::check_ngrams(end, multipliers, sizes, offsets, known);
    check_size("ngrams: columns of out", size_of(out, 1), call.heads() * columns);
    check_indices("ngrams: ids", ids.data(), tokens, int64_t{1} << 24);
    call.ids = ids.data();
    call.states = check_states("ngrams", pool, at, call.state_floats(), reads, writes, starts, tokens);
    std::vector<int32_t> rows(static_cast<size_t>(tokens * call.heads()));
    call.rows = rows.data();
    run_alone(runtime, [&] {
        mlxr::find_ngrams(call);
        mlxr::embed(runtime, table, data.data(), columns, rows.data(), tokens * call.heads(), out.data());
    });
}

}  // namespace

void bind_mixers(nb::module_& m) {
    const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
    m.def("short_conv", &run_short_conv, nb::arg("runtime"), array("x"), nb::arg("first"), array("weight"),
          array("bias").none(), nb::arg("kind"), array("out"), array("pool"), nb::arg("at"), array("reads"),
          array("writes"), array("starts"));
    m.def("gated_delta", &run_gated_delta, nb::arg("runtime"), array("qkv"), array("x"), nb::arg("first"),
          array("rates"), array("bias"), nb::arg("key_heads"), nb::arg("value_heads"), nb::arg("rows"),
          nb::arg("tiled"), nb::arg("eps"), nb::arg("scale"), nb::arg("bound"), array("out"), array("pool"),
          nb::arg("at"), array("reads"), array("writes"), array("starts"));
    m.def("mamba2", &run_mamba2, nb::arg("runtime"), array("xbc"), array("x"), nb::arg("first"), array("rates"),
          array("bias"), array("skip"), nb::arg("groups"), nb::arg("rows"), array("out"), array("pool"), nb::arg("at"),
          array("reads"), array("writes"), array("starts"));
    m.def("scan", &run_scan, nb::arg("runtime"), array("u"), array("steps"), array("bc"), array("rates"), array("skip"),
          array("out"), array("pool"), nb::arg("at"), array("reads"), array("writes"), array("starts"));
    m.def("ngrams", &run_ngrams, nb::arg("runtime"), array("ids"), nb::arg("type_name"), array("data"),
          nb::arg("columns"), nb::arg("end"), nb::arg("multipliers"), nb::arg("sizes"), nb::arg("offsets"),
          array("out"), array("pool"), nb::arg("at"), array("reads"), array("writes"), array("starts"));
    m.def("gated_norm", &run_gated_norm, nb::arg("runtime"), array("x"), array("gate"), nb::arg("first"),
          array("weight").none(), nb::arg("width"), nb::arg("eps"), nb::arg("gate_first"), array("out"));
}
