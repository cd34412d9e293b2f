// The Python face of sample: reads the rules of each row from its SampleRow, checks them, draws, and returns what came
// of it. Arrays in a row must not be changed by other threads meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "bindings_checks.h"
#include "sample.h"

void bind_sample(nb::module_& m);

namespace {

using Mask = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// One row's rules, and the arrays they point into.
class RowReader {
  public:
    RowReader(nb::object row, int64_t index, int64_t vocabulary)
        : row_(std::move(row)), where_("sample: rows[" + std::to_string(index) + "]."), vocabulary_(vocabulary) {}

    void read(mlxr::SampleRules& rules) {
        rules.temperature = number("temperature");
        rules.top_p = number("top_p");
        rules.min_p = number("min_p");
        rules.repetition_penalty = number("repetition_penalty");
        rules.presence_penalty = number("presence_penalty");
        rules.frequency_penalty = number("frequency_penalty");
        rules.uniform = number("uniform");
        rules.top_k = count("top_k");
        rules.top_logprobs = std::min(count("top_logprobs"), vocabulary_);
        check("temperature", rules.temperature, rules.temperature >= 0);
        check("top_p", rules.top_p, rules.top_p > 0 && rules.top_p <= 1);
        check("min_p", rules.min_p, rules.min_p >= 0 && rules.min_p <= 1);
        check("repetition_penalty", rules.repetition_penalty, rules.repetition_penalty > 0);
        check("uniform", rules.uniform, rules.uniform >= 0 && rules.uniform < 1);
        read_list("history_ids", history_ids_, "history_counts", history_counts_, rules.history_size);
        read_list("bias_ids", bias_ids_, "bias_values", bias_values_, rules.bias_size);
        rules.history_ids = history_ids_.data();
        rules.history_counts = history_counts_.data();
        rules.bias_ids = bias_ids_.data();
        rules.bias_values = bias_values_.data();
        read_mask(rules);
    }

  private:
    double number(const char* name) const { return nb::cast<double>(row_.attr(name)); }

    // A Python int may be larger than any vocabulary.
    int64_t count(const char* name) const {
        int overflow = 0;
        const nb::object value = row_.attr(name);
        const long long wide = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
        if (PyErr_Occurred() != nullptr) throw nb::python_error();
        if (overflow > 0) return std::numeric_limits<int64_t>::max();
        check(name, static_cast<double>(wide), wide >= 0);
        return wide;
    }

    void check(const char* name, double value, bool fits) const {
        if (!fits) refuse(where_ + name, std::to_string(value), "in the range of SamplingParams");
    }

    // An array as it is: of another type or layout it is refused, never copied.
    template <typename Array>
    void read_array(const char* name, const nb::object& value, Array& array) const {
        if (!nb::try_cast(value, array, false)) refuse(where_ + name, "of another type", "a contiguous array");
    }

    // Ids and what belongs to each of them; empty arrays, which nearly all are, are not looked at further.
    template <typename Array>
    void read_list(const char* ids_name, Ints& ids, const char* values_name, Array& values, int64_t& size) const {
        const nb::object id_array = row_.attr(ids_name), value_array = row_.attr(values_name);
        size = static_cast<int64_t>(nb::len(id_array));
        check_size((where_ + values_name + ": length").c_str(), static_cast<int64_t>(nb::len(value_array)), size);
        if (size == 0) return;
        read_array(ids_name, id_array, ids);
        read_array(values_name, value_array, values);
        check_indices((where_ + ids_name).c_str(), ids.data(), size, vocabulary_);
    }

    void read_mask(mlxr::SampleRules& rules) {
        const nb::object mask = row_.attr("mask");
        rules.mask = nullptr;
        if (mask.is_none()) return;
        read_array("mask", mask, mask_);
        check_size((where_ + "mask: number of words").c_str(), size_of(mask_, 0), (vocabulary_ + 31) / 32);
        rules.mask = mask_.data();
    }

    nb::object row_;
    std::string where_;
    int64_t vocabulary_;
    Ints history_ids_, history_counts_, bias_ids_;
    Vector bias_values_;
    Mask mask_;
};

void check_outcome(int64_t row, const mlxr::SampleOutcome& outcome) {
    if (outcome.fault != mlxr::SampleFault::not_number) return;
    refuse("sample: logits of row " + std::to_string(row), "not a number at id " + std::to_string(outcome.fault_id),
           "numbers");
}

// For each row (token id, log-probability, its best tokens in the same form); no best ones where no token is possible.
nb::list sample(Runtime& runtime, Matrix logits, nb::sequence rows) {
    mlxr::SampleCall call{};
    call.logits = logits.data();
    call.rows = size_of(logits, 0);
    call.vocabulary = size_of(logits, 1);
    if (call.vocabulary == 0 || call.vocabulary > INT32_MAX) {
        refuse("sample: columns of logits", std::to_string(call.vocabulary), "at least 1, below 2**31");
    }
    const size_t count = nb::len(rows);
    check_size("sample: number of rows", static_cast<int64_t>(count), call.rows);
    std::vector<RowReader> readers;
    std::vector<mlxr::SampleRules> rules(count);
    std::vector<mlxr::SampleOutcome> outcomes(count);
    readers.reserve(count);
    for (size_t row = 0; row < count; ++row) {
        readers.emplace_back(nb::object(rows[row]), static_cast<int64_t>(row), call.vocabulary);
        readers.back().read(rules[row]);
        call.top_width = std::max(call.top_width, rules[row].top_logprobs);
    }
    std::vector<int32_t> top_ids(count * static_cast<size_t>(call.top_width));
    std::vector<double> top_logprobs(top_ids.size());
    call.rules = rules.data();
    call.outcomes = outcomes.data();
    call.top_ids = top_ids.data();
    call.top_logprobs = top_logprobs.data();
    run_alone(runtime, [&] { mlxr::run_sample(runtime, call); });
    nb::list results;
    for (size_t row = 0; row < count; ++row) {
        const mlxr::SampleOutcome& outcome = outcomes[row];
        check_outcome(static_cast<int64_t>(row), outcome);
        nb::list best;
        const int64_t first = static_cast<int64_t>(row) * call.top_width;
        const int64_t last = outcome.token_id == mlxr::kNoToken ? first : first + rules[row].top_logprobs;
        for (int64_t i = first; i < last; ++i) best.append(nb::make_tuple(call.top_ids[i], call.top_logprobs[i]));
        results.append(nb::make_tuple(outcome.token_id, outcome.logprob, best));
    }
    return results;
}

}  // namespace

void bind_sample(nb::module_& m) {
    m.def("sample", &sample, nb::arg("runtime"), nb::arg("logits").noconvert(), nb::arg("rows"));
}
