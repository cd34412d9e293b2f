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
#include "operator_table.h"
#include "runtime.h"
#include "sample.h"

namespace nb = nanobind;

void bind_operators(nb::module_& m);

namespace {

using mlxr::Runtime;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MatrixOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Heads = nb::ndarray<const float, nb::ndim<3>, nb::device::cpu>;
using HeadsOut = nb::ndarray<float, nb::ndim<3>, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntMatrix = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MaskMatrix = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntMatrixOut = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntsOut = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using DoubleMatrix = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using DoubleMatrixOut = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using DoublesOut = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Pool = nb::ndarray<nb::ro, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using PoolOut = nb::ndarray<nb::ndim<4>, nb::c_contig, nb::device::cpu>;

template <typename Array>
int64_t size_of(const Array& array, size_t axis) {
    return static_cast<int64_t>(array.shape(axis));
}

[[noreturn]] void refuse(const std::string& what, const std::string& has, const std::string& wants) {
    throw nb::value_error((what + " is " + has + ", expected " + wants).c_str());
}

void check_size(const char* what, int64_t has, int64_t wants) {
    if (has != wants) refuse(what, std::to_string(has), std::to_string(wants));
}

// Every value of `values` in [0, limit).
void check_indices(const char* what, const int32_t* values, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i) {
        if (values[i] < 0 || values[i] >= limit) {
            refuse(std::string(what) + "[" + std::to_string(i) + "]", std::to_string(values[i]),
                   "0 to " + std::to_string(limit - 1));
        }
    }
}

// The token stride, in elements, of an array whose last two axes must be contiguous.
template <typename Array>
int64_t token_stride_of(const char* what, const Array& array) {
    const bool heads_packed = array.stride(1) == size_of(array, 2) || array.shape(1) == 1;
    if ((array.stride(2) != 1 && array.shape(2) != 1) || !heads_packed) {
        refuse(what, "strided in heads or head_dim", "heads and head_dim contiguous");
    }
    return array.stride(0);
}

// Runs body(first, last) over [0, count), on several threads when the work, in elements, is worth it.
template <typename Body>
void run_ranges(Runtime& runtime, int64_t count, int64_t elements_each, Body&& body) {
    constexpr int64_t kSerialElements = 1 << 15;
    const int threads = runtime.pool.threads();
    if (threads == 1 || count * elements_each < kSerialElements) return body(int64_t{0}, count);
    const int64_t parts = std::min<int64_t>(count, threads);
    runtime.pool.parallel_for_static(static_cast<int>(parts),
                                     [&](int part, int) { body(count * part / parts, count * (part + 1) / parts); });
}

// Without the GIL, and alone on the runtime.
template <typename Body>
void run_alone(Runtime& runtime, Body&& body) {
    nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(runtime.mutex);
    body(*mlxr::operator_table(runtime.isa));
}

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
    run_alone(runtime, [&](const mlxr::OperatorTable& table) {
        run_ranges(runtime, rows, columns, [&](int64_t first, int64_t last) { table.rms_norm(call, first, last); });
    });
}

void run_rope(Runtime& runtime, HeadsOut x, Ints positions, Matrix cosines, Matrix sines, bool interleaved) {
    const int64_t tokens = size_of(x, 0), half = size_of(cosines, 1);
    mlxr::RopeCall call{};
    call.x = x.data();
    call.token_stride = token_stride_of("rope: x", x);
    call.heads = size_of(x, 1);
    call.head_dim = size_of(x, 2);
    call.positions = positions.data();
    call.cosines = cosines.data();
    call.sines = sines.data();
    call.rot_dim = 2 * half;
    call.interleaved = interleaved;
    check_size("rope: length of positions", size_of(positions, 0), tokens);
    check_size("rope: rows of sin", size_of(sines, 0), size_of(cosines, 0));
    check_size("rope: columns of sin", size_of(sines, 1), half);
    if (call.rot_dim > std::min(call.head_dim, mlxr::kMaxRotDim)) {
        refuse("rope: rot_dim of table", std::to_string(call.rot_dim),
               "at most the head_dim of x and " + std::to_string(mlxr::kMaxRotDim));
    }
    check_indices("rope: positions", call.positions, tokens, size_of(cosines, 0));
    run_alone(runtime, [&](const mlxr::OperatorTable& table) {
        run_ranges(runtime, tokens, call.heads * call.rot_dim,
                   [&](int64_t first, int64_t last) { table.rope(call, first, last); });
    });
}

void run_activate(Runtime& runtime, Matrix gate_up, const char* kind, MatrixOut out) {
    const int64_t rows = size_of(out, 0), columns = size_of(out, 1);
    check_size("activate: rows of gate_up", size_of(gate_up, 0), rows);
    check_size("activate: columns of gate_up", size_of(gate_up, 1), 2 * columns);
    mlxr::ActivateCall call{gate_up.data(), out.data(), columns, mlxr::Activation::silu};
    if (std::string(kind) == "gelu_tanh") {
        call.kind = mlxr::Activation::gelu_tanh;
    } else if (std::string(kind) != "silu") {
        refuse("activate: kind", kind, "silu or gelu_tanh");
    }
    constexpr int64_t kStrip = 1024;  // columns of one row that one thread takes
    const int64_t strips = (columns + kStrip - 1) / kStrip;
    run_alone(runtime, [&](const mlxr::OperatorTable& table) {
        run_ranges(runtime, rows * strips, std::min(columns, kStrip) * 4, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) {
                const int64_t start = i % strips * kStrip;
                table.activate(call, i / strips, start, std::min(columns, start + kStrip));
            }
        });
    });
}

// float32, float16, or bf16 as uint16 (NumPy has no bf16).
template <typename Array>
mlxr::PageType page_type_of(const char* what, const Array& pool) {
    const auto code = pool.dtype().code;
    const bool is_float = code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float);
    if (pool.dtype().lanes == 1) {
        if (is_float && pool.dtype().bits == 32) return mlxr::PageType::f32;
        if (is_float && pool.dtype().bits == 16) return mlxr::PageType::f16;
        if (code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt) && pool.dtype().bits == 16) {
            return mlxr::PageType::bf16;
        }
    }
    refuse(what, "of another type", "float16, float32, or uint16 (bf16)");
}

template <typename Array>
void check_pools(const char* operator_name, const Array& k_pool, const Array& v_pool) {
    const std::string name(operator_name);
    for (size_t axis = 0; axis < 4; ++axis) {
        check_size((name + ": axis " + std::to_string(axis) + " of v_pool").c_str(), size_of(v_pool, axis),
                   size_of(k_pool, axis));
        if (k_pool.shape(axis) == 0) refuse(name + ": k_pool", "empty", "at least one page");
    }
    if (page_type_of((name + ": k_pool").c_str(), k_pool) != page_type_of((name + ": v_pool").c_str(), v_pool)) {
        refuse(name + ": v_pool", "of another type than k_pool", "the same");
    }
}

void run_write_pages(Runtime& runtime, Heads k, Heads v, PoolOut k_pool, PoolOut v_pool, Ints slots) {
    check_pools("write_pages", k_pool, v_pool);
    const int64_t pages = size_of(k_pool, 0), tokens = size_of(slots, 0);
    mlxr::WritePagesCall calls[2] = {};
    for (int i = 0; i < 2; ++i) {
        const Heads& rows = i == 0 ? k : v;
        mlxr::WritePagesCall& call = calls[i];
        call.rows = rows.data();
        call.token_stride = token_stride_of(i == 0 ? "write_pages: k" : "write_pages: v", rows);
        call.tokens = tokens;
        call.kv_heads = size_of(k_pool, 1);
        call.page_size = size_of(k_pool, 2);
        call.head_dim = size_of(k_pool, 3);
        call.slots = slots.data();
        call.pool = i == 0 ? k_pool.data() : v_pool.data();
        call.type = page_type_of("write_pages: k_pool", k_pool);
        call.values = i == 1;
        check_size("write_pages: tokens of k and v", size_of(rows, 0), tokens);
        check_size("write_pages: heads of k and v", size_of(rows, 1), call.kv_heads);
        check_size("write_pages: head_dim of k and v", size_of(rows, 2), call.head_dim);
    }
    check_indices("write_pages: slots", slots.data(), tokens, pages * calls[0].page_size);
    run_alone(runtime, [&](const mlxr::OperatorTable& table) {
        run_ranges(runtime, 2 * calls[0].kv_heads, tokens * calls[0].head_dim, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) table.write_pages(calls[i % 2], i / 2);
        });
    });
}

// The pages that some query of a sequence sees; entries before a sliding window may be anything.
void check_sequence(const mlxr::AttendCall& call, int64_t sequence, int64_t tokens, int64_t pages) {
    const std::string index = "[" + std::to_string(sequence) + "]";
    const int64_t start = call.query_starts[sequence], stop = call.query_starts[sequence + 1];
    const int64_t context = call.context_lengths[sequence];
    if (stop < start || start < 0 || stop > tokens) {
        refuse("attend: query_starts" + index, std::to_string(start) + " before " + std::to_string(stop),
               "ascending from 0 to " + std::to_string(tokens));
    }
    if (context < stop - start || context > call.table_stride * call.page_size) {
        refuse("attend: context_lengths" + index, std::to_string(context),
               std::to_string(stop - start) + " to " + std::to_string(call.table_stride * call.page_size) +
                   " (queries, and positions in the page table)");
    }
    if (stop == start) return;
    const int64_t first_visible = std::max<int64_t>(context - (stop - start) + 1 - call.window, 0);
    for (int64_t i = first_visible / call.page_size; i <= (context - 1) / call.page_size; ++i) {
        const int32_t page = call.page_table[sequence * call.table_stride + i];
        if (page < 0 || page >= pages) {
            refuse("attend: page_table[" + std::to_string(sequence) + ", " + std::to_string(i) + "]",
                   std::to_string(page), "0 to " + std::to_string(pages - 1));
        }
    }
}

void run_attend(Runtime& runtime, Heads q, Pool k_pool, Pool v_pool, Ints query_starts, Ints context_lengths,
                IntMatrix page_table, float scale, int64_t window, MatrixOut out) {
    check_pools("attend", k_pool, v_pool);
    const int64_t tokens = size_of(q, 0), sequences = size_of(context_lengths, 0);
    mlxr::AttendCall call{};
    call.q = q.data();
    call.q_stride = token_stride_of("attend: q", q);
    call.k_pool = k_pool.data();
    call.v_pool = v_pool.data();
    call.type = page_type_of("attend: k_pool", k_pool);
    call.heads = size_of(q, 1);
    call.kv_heads = size_of(k_pool, 1);
    call.page_size = size_of(k_pool, 2);
    call.head_dim = size_of(k_pool, 3);
    call.padded_dim = (call.head_dim + 15) / 16 * 16;
    call.scale = scale;
    call.window = window > 0 ? window : int64_t{1} << 40;
    call.query_starts = query_starts.data();
    call.context_lengths = context_lengths.data();
    call.page_table = page_table.data();
    call.table_stride = size_of(page_table, 1);
    call.out = out.data();
    check_size("attend: head_dim of q", size_of(q, 2), call.head_dim);
    if (call.heads == 0 || call.heads % call.kv_heads != 0) {
        refuse("attend: heads of q", std::to_string(call.heads),
               "a multiple of the " + std::to_string(call.kv_heads) + " key heads");
    }
    call.group = call.heads / call.kv_heads;
    check_size("attend: rows of out", size_of(out, 0), tokens);
    check_size("attend: columns of out", size_of(out, 1), call.heads * call.head_dim);
    check_size("attend: length of query_starts", size_of(query_starts, 0), sequences + 1);
    check_size("attend: rows of page_table", size_of(page_table, 0), sequences);
    check_size("attend: first of query_starts", call.query_starts[0], 0);
    check_size("attend: last of query_starts", call.query_starts[sequences], tokens);
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
        check_sequence(call, sequence, tokens, size_of(k_pool, 0));
    }
    run_alone(runtime, [&](const mlxr::OperatorTable&) { mlxr::run_attend(runtime, call, sequences); });
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
    run_alone(runtime, [&](const mlxr::OperatorTable&) {
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
