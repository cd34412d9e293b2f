// The choice of the next token from a row of logits: bias, penalties, truncation, draw, and
// log-probabilities. What the rules mean is said in src/mlxr/kernels/sample. Each row is computed by one
// thread in one order, in scratch that the Runtime keeps; nothing is sorted that need not be. Knows no
// Python.
#pragma once

#include <stdint.h>

#include "runtime/runtime.h"

namespace mlxr {

constexpr int32_t kNoToken = -1;

struct SampleRules {
    double temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, uniform;
    double top_n_sigma, typical_p, xtc_probability, xtc_threshold, chance;
    double dynatemp_range, dynatemp_exponent, surprise_bound;
    bool temperature_last;
    int64_t mirostat, top_k, top_logprobs;
    int64_t history_size, bias_size, dry_size;
    const int32_t* history_ids;  // distinct
    const int32_t* history_counts;
    const int32_t* bias_ids;  // distinct
    const float* bias_values;
    const int32_t* dry_ids;  // distinct
    const float* dry_penalties;
    const uint32_t* mask;  // a bit for each token that may be chosen; null: all of them
};

enum class SampleFault : int { none, not_number };

struct SampleOutcome {
    SampleFault fault;
    int64_t fault_id;  // where the fault is not_number
    int32_t token_id;  // kNoToken where no logit is finite
    double logprob, surprise;
};

struct SampleCall {
    const float* logits;  // (rows, vocabulary)
    int64_t rows, vocabulary;
    const SampleRules* rules;  // (rows), checked: ids within the vocabulary, values in range
    SampleOutcome* outcomes;   // (rows)
    int32_t* top_ids;          // (rows, top_width); the first top_logprobs of each row are set
    double* top_logprobs;      // the same
    int64_t top_width;
};

// The caller holds runtime.mutex. Throws std::bad_alloc when scratch cannot grow.
void run_sample(Runtime& runtime, const SampleCall& call);

}  // namespace mlxr
