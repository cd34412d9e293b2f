// The Python face of the operators other than linear and embed. Checks everything that an index or a length
// in the arguments could break (ValueError naming operator and argument), releases the GIL, locks the
// Runtime, and runs. The arrays must not be changed by other threads meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>

#include "attend.h"
#include "bindings_checks.h"
#include "sample.h"
#include "spread.h"

namespace nb = nanobind;

void bind_operators(nb::module_& m);

namespace {

void run_rms_norm(Runtime& runtime, Matrix x, Vector weight, float eps, std::optional<Matrix> residual,
                  MatrixOut normed, std::optional<MatrixOut> summed) {
    const int64_t rows = size_of(x, 0), columns = size_of(x, 1);
    check_size("rms_norm: length of weight", size_of(weight, 0), columns);
    const auto check_shape = [&](const char* what, const auto& array) {
        if (size_of(array, 0) != rows || size_of(array, 1) != columns) refuse(what, "not shaped as x", "its shape");
    };
    check_shape("rms_norm: normed", normed);
    if (residual) check_shape("rms_norm: residual", *residual);
    if (summed) check_shape("rms_norm: summed", *summed);
    if (residual.has_value() != summed.has_value()) refuse("rms_norm: summed", "alone", "given with residual");
    const mlxr::RmsNormCall call{x.data(),
                                 residual ? residual->data() : nullptr,
                                 weight.data(),
                                 normed.data(),
                                 summed ? summed->data() : nullptr,
                                 columns,
                                 eps};
    run_alone(runtime, [&] { mlxr::spread_rms_norm(runtime, call, rows); });
}

void run_rope(Runtime& runtime, HeadsOut x, Ints positions, Matrix cosines, Matrix sines, bool interleaved) {
    const int64_t tokens = size_of(x, 0);
    mlxr::RopeCall call = check_rope(positions, cosines, sines, interleaved, tokens, size_of(x, 2));
    call.x = x.data();
    call.token_stride = token_stride_of("rope: x", x);
    call.heads = size_of(x, 1);
    run_alone(runtime, [&] { mlxr::spread_rope(runtime, call, tokens); });
}

void run_activate(Runtime& runtime, Matrix gate_up, const char* kind, MatrixOut out) {
    const int64_t rows = size_of(out, 0), columns = size_of(out, 1);
    check_size("activate: rows of gate_up", size_of(gate_up, 0), rows);
    check_size("activate: columns of gate_up", size_of(gate_up, 1), 2 * columns);
    const mlxr::ActivateCall call{gate_up.data(), out.data(), columns, parse_activation("activate: kind", kind)};
    run_alone(runtime, [&] { mlxr::spread_activate(runtime, call, rows); });
}

void run_write_pages(Runtime& runtime, Heads k, Heads v, PoolOut k_pool, PoolOut v_pool, Ints slots) {
    mlxr::WritePagesCall keys = check_write(k_pool, v_pool, slots, size_of(k, 0)), values = keys;
    keys.rows = k.data();
    keys.token_stride = token_stride_of("write_pages: k", k);
    values.rows = v.data();
    values.token_stride = token_stride_of("write_pages: v", v);
    values.pool = v_pool.data();
    values.values = true;
    for (const Heads& rows : {k, v}) {
        check_size("write_pages: tokens of k and v", size_of(rows, 0), keys.tokens);
        check_size("write_pages: heads of k and v", size_of(rows, 1), keys.kv_heads);
        check_size("write_pages: head_dim of k and v", size_of(rows, 2), keys.head_dim);
    }
    run_alone(runtime, [&] { mlxr::spread_write_pages(runtime, keys, values); });
}

void run_attend(Runtime& runtime, Heads q, Pool k_pool, Pool v_pool, Ints query_starts, Ints context_lengths,
                IntMatrix page_table, float scale, int64_t window, MatrixOut out) {
    const int64_t tokens = size_of(q, 0);
    mlxr::AttendCall call =
        check_attend(k_pool, v_pool, query_starts, context_lengths, page_table, tokens, size_of(q, 1), scale, window);
    call.q = q.data();
    call.q_stride = token_stride_of("attend: q", q);
    call.out = out.data();
    check_size("attend: head_dim of q", size_of(q, 2), call.head_dim);
    check_size("attend: rows of out", size_of(out, 0), tokens);
    check_size("attend: columns of out", size_of(out, 1), call.heads * call.head_dim);
    run_alone(runtime, [&] { mlxr::run_attend(runtime, call, size_of(context_lengths, 0)); });
}

// Columns of the parameters of sample, one row each; cpu.py fills them in this order.
enum Column : size_t { temperature, top_p, min_p, repetition, presence, frequency, uniform, double_columns };
enum IntColumn : size_t { top_k, top_logprobs, int_columns };

// What belongs to one row in lists of all rows: [starts[row], starts[row + 1]).
void check_starts(const char* what, const Ints& starts, int64_t rows, int64_t size) {
    check_size(what, size_of(starts, 0), rows + 1);
    check_size(what, starts.data()[0], 0);
    check_size(what, starts.data()[rows], size);
    for (int64_t row = 0; row < rows; ++row) {
        if (starts.data()[row] > starts.data()[row + 1]) refuse(what, "not ascending", "ascending");
    }
}

mlxr::SampleRules read_rules(int64_t row, const double* numbers, const int32_t* counts, int64_t top_width) {
    const std::string where = "sample: rows[" + std::to_string(row) + "].";
    mlxr::SampleRules rules{};
    rules.temperature = numbers[temperature];
    rules.top_p = numbers[top_p];
    rules.min_p = numbers[min_p];
    rules.repetition_penalty = numbers[repetition];
    rules.presence_penalty = numbers[presence];
    rules.frequency_penalty = numbers[frequency];
    rules.uniform = numbers[uniform];
    rules.top_k = counts[top_k];
    rules.top_logprobs = counts[top_logprobs];
    const auto check = [&](const char* name, double value, bool fits) {
        if (!fits) refuse(where + name, std::to_string(value), "in the range of SamplingParams");
    };
    check("temperature", rules.temperature, rules.temperature >= 0);
    check("top_p", rules.top_p, rules.top_p > 0 && rules.top_p <= 1);
    check("min_p", rules.min_p, rules.min_p >= 0 && rules.min_p <= 1);
    check("repetition_penalty", rules.repetition_penalty, rules.repetition_penalty > 0);
    check("uniform", rules.uniform, rules.uniform >= 0 && rules.uniform < 1);
    check("top_k", static_cast<double>(rules.top_k), rules.top_k >= 0);
    check("top_logprobs", static_cast<double>(rules.top_logprobs),
          rules.top_logprobs >= 0 && rules.top_logprobs <= top_width);
    return rules;
}

void report_fault(int64_t row, const mlxr::SampleOutcome& outcome) {
    const std::string where = "sample: logits of row " + std::to_string(row);
    if (outcome.fault == mlxr::SampleFault::not_number) {
        refuse(where, "not a number at id " + std::to_string(outcome.fault_id), "numbers");
    }
}

void run_sample(Runtime& runtime, Matrix logits, DoubleMatrix numbers, IntMatrix counts, Ints history_ids,
                Ints history_counts, Ints history_starts, Ints bias_ids, Vector bias_values, Ints bias_starts,
                MaskMatrix masks, Ints mask_rows, IntsOut token_ids, DoublesOut logprobs, IntMatrixOut top_ids,
                DoubleMatrixOut top_values) {
    mlxr::SampleCall call{};
    call.logits = logits.data();
    call.rows = size_of(logits, 0);
    call.vocabulary = size_of(logits, 1);
    call.top_ids = top_ids.data();
    call.top_logprobs = top_values.data();
    call.top_width = size_of(top_ids, 1);
    if (call.vocabulary == 0 || call.vocabulary > INT32_MAX) {
        refuse("sample: columns of logits", std::to_string(call.vocabulary), "at least 1, below 2**31");
    }
    check_size("sample: rows of numbers", size_of(numbers, 0), call.rows);
    check_size("sample: columns of numbers", size_of(numbers, 1), double_columns);
    check_size("sample: rows of counts", size_of(counts, 0), call.rows);
    check_size("sample: columns of counts", size_of(counts, 1), int_columns);
    check_size("sample: length of token_ids", size_of(token_ids, 0), call.rows);
    check_size("sample: length of logprobs", size_of(logprobs, 0), call.rows);
    check_size("sample: rows of top_ids", size_of(top_ids, 0), call.rows);
    check_size("sample: rows of top_logprobs", size_of(top_values, 0), call.rows);
    check_size("sample: columns of top_logprobs", size_of(top_values, 1), call.top_width);
    check_size("sample: length of history_counts", size_of(history_counts, 0), size_of(history_ids, 0));
    check_size("sample: length of bias_values", size_of(bias_values, 0), size_of(bias_ids, 0));
    check_starts("sample: history_starts", history_starts, call.rows, size_of(history_ids, 0));
    check_starts("sample: bias_starts", bias_starts, call.rows, size_of(bias_ids, 0));
    check_indices("sample: history_ids", history_ids.data(), size_of(history_ids, 0), call.vocabulary);
    check_indices("sample: bias_ids", bias_ids.data(), size_of(bias_ids, 0), call.vocabulary);
    const int64_t words = (call.vocabulary + 31) / 32;
    check_size("sample: length of mask_rows", size_of(mask_rows, 0), call.rows);
    if (size_of(masks, 0) > 0) check_size("sample: columns of masks", size_of(masks, 1), words);
    for (int64_t row = 0; row < call.rows; ++row) {
        const int32_t place = mask_rows.data()[row];
        if (place < -1 || place >= size_of(masks, 0)) {
            refuse("sample: mask_rows", std::to_string(place), "a row of masks, or -1");
        }
    }

    const size_t rows = static_cast<size_t>(call.rows);
    run_alone(runtime, [&] {
        std::byte* const space =
            runtime.scratch(mlxr::Scratch::operators, rows * (sizeof(mlxr::SampleRules) + sizeof(mlxr::SampleOutcome)));
        auto* const rules = reinterpret_cast<mlxr::SampleRules*>(space);
        call.rules = rules;
        call.outcomes = reinterpret_cast<mlxr::SampleOutcome*>(space + rows * sizeof(mlxr::SampleRules));
        for (int64_t row = 0; row < call.rows; ++row) {
            mlxr::SampleRules& rule = rules[row];
            rule = read_rules(row, numbers.data() + row * double_columns, counts.data() + row * int_columns,
                              call.top_width);
            const int32_t history = history_starts.data()[row], bias = bias_starts.data()[row];
            rule.history_size = history_starts.data()[row + 1] - history;
            rule.bias_size = bias_starts.data()[row + 1] - bias;
            rule.history_ids = history_ids.data() + history;
            rule.history_counts = history_counts.data() + history;
            rule.bias_ids = bias_ids.data() + bias;
            rule.bias_values = bias_values.data() + bias;
            const int32_t place = mask_rows.data()[row];
            rule.mask = place < 0 ? nullptr : masks.data() + place * words;
        }
        mlxr::run_sample(runtime, call);
        for (int64_t row = 0; row < call.rows; ++row) {
            report_fault(row, call.outcomes[row]);
            token_ids.data()[row] = call.outcomes[row].token_id;
            logprobs.data()[row] = call.outcomes[row].logprob;
        }
    });
}

}  // namespace

void bind_operators(nb::module_& m) {
    // No conversions: an array of another type or layout is refused, never copied.
    const auto array = [](const char* name) { return nb::arg(name).noconvert(); };
    m.def("rms_norm", &run_rms_norm, nb::arg("runtime"), array("x"), array("weight"), nb::arg("eps"),
          array("residual").none(), array("normed"), array("summed").none());
    m.def("rope", &run_rope, nb::arg("runtime"), array("x"), array("positions"), array("cos"), array("sin"),
          nb::arg("interleaved"));
    m.def("activate", &run_activate, nb::arg("runtime"), array("gate_up"), nb::arg("kind"), array("out"));
    m.def("write_pages", &run_write_pages, nb::arg("runtime"), array("k"), array("v"), array("k_pool"), array("v_pool"),
          array("slots"));
    m.def("attend", &run_attend, nb::arg("runtime"), array("q"), array("k_pool"), array("v_pool"),
          array("query_starts"), array("context_lengths"), array("page_table"), nb::arg("scale"), nb::arg("window"),
          array("out"));
    m.def("sample", &run_sample, nb::arg("runtime"), array("logits"), array("numbers"), array("counts"),
          array("history_ids"), array("history_counts"), array("history_starts"), array("bias_ids"),
          array("bias_values"), array("bias_starts"), array("masks"), array("mask_rows"), array("token_ids"),
          array("logprobs"), array("top_ids"), array("top_logprobs"));
}
