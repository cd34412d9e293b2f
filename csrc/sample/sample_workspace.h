// What the two halves of sample share: one thread's scratch for a row, the order of candidates, and draws by the rules
// that keep a head of that order. Included by sample*.cpp alone.
#pragma once

#include <cstdint>
#include <limits>

#include "operators/operator_table.h"
#include "sample/sample.h"

namespace mlxr {

constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr int64_t kMassBins = 8192;
constexpr int64_t kSpareBins = 8;  // for what has no weight
constexpr float kBinsPerNat = 64.0f;

// One thread's scratch for one row. Its candidates are all tokens, or the few that were moved together: then `count`
// is how many, and a candidate's place is not its id.
struct Workspace {
    const OperatorTable* table;
    int64_t count, blocks;
    bool is_few;
    float* adjusted;     // (count)
    float* terms;        // (count)
    int32_t* ids;        // (count)
    int32_t* few_ids;    // (kFew), rising
    float* block_peaks;  // (blocks)
    float* peak_order;   // (blocks)
    double* masses;      // (kMassBins + kSpareBins)

    void set_count(int64_t candidates) {
        count = candidates;
        blocks = (candidates + kScanBlock - 1) / kScanBlock;
    }
    int32_t id_of(int64_t place) const { return is_few ? few_ids[place] : static_cast<int32_t>(place); }
};

// Falling logit, then rising id: the order of all candidates.
struct Before {
    const float* logits;
    bool operator()(int32_t a, int32_t b) const { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; }
};

struct SampleChoice {
    int64_t place;
    double surprise;  // in bits, by Mirostat
};

// The places of the first `wanted` candidates, in order, at the start of space.ids. Returns how many (there may be
// fewer).
int64_t sort_best(const float* logits, int64_t wanted, Workspace& space);

// Draw among all candidates, each with the weight e**((logit - peak) * factor), by top_p, min_p and uniform.
int32_t draw_among_all(const float* logits, float peak, float factor, const SampleRules& rules, Workspace& space);

// Whether a row needs `choose_by_rules`: anything but temperature, top_k, top_p and min_p decides.
bool has_other_rules(const SampleRules& rules);

// The choice by all rules; `scan` is that of `logits`, some of which are finite. Those logits may be space.adjusted,
// and are as they were afterwards.
SampleChoice choose_by_rules(const float* logits, const LogitScan& scan, const SampleRules& rules, Workspace& space);

}  // namespace mlxr
