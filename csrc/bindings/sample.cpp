// The Python face of sample: reads the rules of each row from its SampleRow, checks them, draws, and returns what came
// of it. Arrays in a row must not be changed by other threads meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "bindings/checks.h"
#include "sample/sample.h"

void bind_sample(nb::module_& m);

namespace {

using Mask = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// One row's rules, and the arrays they point into.
class RowReader {
  public:
    RowReader(nb::object row, int64_t index, int64_t vocabulary)
        : row_(std::move(row)), where_("sample: rows[" + std::to_string(index) + "]."), vocabulary_(vocabulary) {}

    void read(mlxr::SampleRules& rules) {
        read_params(rules);
        rules.uniform = number(row_, "uniform");
        rules.chance = number(row_, "chance");
        rules.surprise_bound = number(row_, "surprise_bound");
        rules.top_logprobs = std::min(count(row_, "top_logprobs"), vocabulary_);
        check("uniform", rules.uniform, rules.uniform >= 0 && rules.uniform < 1);
        check("chance", rules.chance, rules.chance >= 0 && rules.chance < 1);
        check("surprise_bound", rules.surprise_bound, !std::isnan(rules.surprise_bound));
        read_list("history_ids", history_ids_, "history_counts", history_counts_, rules.history_size);
        read_list("bias_ids", bias_ids_, "bias_values", bias_values_, rules.bias_size);
        read_list("dry_ids", dry_ids_, "dry_penalties", dry_penalties_, rules.dry_size);
        rules.dry_ids = dry_ids_.data();
        rules.dry_penalties = dry_penalties_.data();
        rules.history_ids = history_ids_.data();
        rules.history_counts = history_counts_.data();
        rules.bias_ids = bias_ids_.data();
        rules.bias_values = bias_values_.data();
        read_mask(rules);
    }

  private:
    // What SamplingParams has; it checks the values too, but nothing says that it made these.
    void read_params(mlxr::SampleRules& rules) const {
        const nb::object params = row_.attr("params");
        rules.temperature = number(params, "temperature", 0, 100);
        rules.top_p = number(params, "top_p", 1e-300, 1);
        rules.min_p = number(params, "min_p", 0, 1);
        rules.repetition_penalty = number(params, "repetition_penalty", 1e-300, 100);
        rules.presence_penalty = number(params, "presence_penalty", -100, 100);
        rules.frequency_penalty = number(params, "frequency_penalty", -100, 100);
        rules.top_n_sigma = number(params, "top_n_sigma", 0, 100);
        rules.typical_p = number(params, "typical_p", 0, 1);
        rules.xtc_probability = number(params, "xtc_probability", 0, 1);
        rules.xtc_threshold = number(params, "xtc_threshold", 0, 1);
        rules.dynatemp_range = number(params, "dynatemp_range", 0, 100);
        rules.dynatemp_exponent = number(params, "dynatemp_exponent", 0, 100);
        rules.temperature_last = nb::cast<bool>(params.attr("temperature_last"));
        rules.mirostat = count(params, "mirostat");
        rules.top_k = count(params, "top_k");
        check("mirostat", static_cast<double>(rules.mirostat), rules.mirostat <= 2);
    }

    static double number(const nb::object& holder, const char* name) { return nb::cast<double>(holder.attr(name)); }

    double number(const nb::object& holder, const char* name, double low, double high) const {
        const double value = number(holder, name);
        check(name, value, value >= low && value <= high);
        return value;
    }

    // A Python int may be larger than any vocabulary.
    int64_t count(const nb::object& holder, const char* name) const {
        int overflow = 0;
        const nb::object value = holder.attr(name);
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
    Ints history_ids_, history_counts_, bias_ids_, dry_ids_;
    Vector bias_values_, dry_penalties_;
    Mask mask_;
};

void check_outcome(int64_t row, const mlxr::SampleOutcome& outcome) {
    if (outcome.fault != mlxr::SampleFault::not_number) return;
    refuse("sample: logits of row " + std::to_string(row), "not a number at id " + std::to_string(outcome.fault_id),
           "numbers");
}

// For each row (token id, log-probability, its best tokens in the same form, Mirostat's surprise); no best ones where
// no token is possible.
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
        results.append(nb::make_tuple(outcome.token_id, outcome.logprob, best, outcome.surprise));
    }
    return results;
}

}  // namespace

void bind_sample(nb::module_& m) {
    m.def("sample", &sample, nb::arg("runtime"), nb::arg("logits").noconvert(), nb::arg("rows"));
}
