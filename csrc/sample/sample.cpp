// See sample.h. Without top_k the order of all logits would have to be known; instead their probability mass
// is summed into bins of nearly equal logits, and only the bin in which a sum is reached is sorted. Where a mask
// leaves few tokens, as grammars mostly do, only those are looked at: they are moved together first.
#include "sample/sample.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "operators/operator_table.h"
#include "sample/sample_workspace.h"

namespace mlxr {

namespace {

constexpr int64_t kMassBytes = (kMassBins + kSpareBins) * 8;
constexpr int64_t kFew = 256;

int64_t round_up(int64_t value, int64_t unit) {
    return (value + unit - 1) / unit * unit;
}

int64_t workspace_bytes(int64_t vocabulary) {
    const int64_t blocks = vocabulary / kScanBlock + 1;
    return round_up(kMassBytes + kFew * 4 + 3 * round_up(vocabulary * 4, 64) + 2 * round_up(blocks * 4, 64), 4096);
}

Workspace lay_out_workspace(std::byte* scratch, int64_t vocabulary, const OperatorTable* table) {
    Workspace space{};
    space.table = table;
    space.set_count(vocabulary);
    const int64_t row_bytes = round_up(vocabulary * 4, 64);
    space.masses = reinterpret_cast<double*>(scratch);
    space.few_ids = reinterpret_cast<int32_t*>(scratch += kMassBytes);
    space.adjusted = reinterpret_cast<float*>(scratch += kFew * 4);
    space.terms = reinterpret_cast<float*>(scratch += row_bytes);
    space.ids = reinterpret_cast<int32_t*>(scratch += row_bytes);
    space.block_peaks = reinterpret_cast<float*>(scratch += row_bytes);
    space.peak_order = reinterpret_cast<float*>(scratch + round_up((vocabulary / kScanBlock + 1) * 4, 64));
    return space;
}

// A bias of +inf against a logit of -inf leaves the token impossible; anything above the range is its end.
float bound_logit(double value) {
    if (std::isnan(value) || value < -static_cast<double>(kLargest)) return kNothing;
    return static_cast<float>(std::min(value, static_cast<double>(kLargest)));
}

// The ids that the mask leaves, rising. Returns how many; -1 if they are more than kFew.
int64_t list_few(const uint32_t* mask, int64_t vocabulary, int32_t* ids) {
    int64_t found = 0;
    for (int64_t first = 0; first < vocabulary; first += 32) {
        uint32_t bits = mask[first / 32];
        if (vocabulary - first < 32) bits &= (1u << (vocabulary - first)) - 1u;
        if (found + std::popcount(bits) > kFew) return -1;
        for (; bits != 0; bits &= bits - 1u) ids[found++] = static_cast<int32_t>(first + std::countr_zero(bits));
    }
    return found;
}

// Fills space.adjusted with the logits that the mask leaves: alone if they are few, else -inf for all others.
void apply_mask(const float* logits, const SampleRules& rules, Workspace& space) {
    const int64_t few = list_few(rules.mask, space.count, space.few_ids);
    if (few < rules.top_logprobs) {  // too many, or impossible tokens are asked for
        space.table->mask_logits(logits, rules.mask, space.count, space.adjusted);
        return;
    }
    space.is_few = true;
    space.set_count(few);
    for (int64_t i = 0; i < few; ++i) space.adjusted[i] = logits[space.few_ids[i]];
}

// Where the logit of a token is; null if the mask leaves it out.
float* find_logit(int32_t id, const SampleRules& rules, const Workspace& space) {
    if (!space.is_few) return space.adjusted + id;
    if ((rules.mask[id / 32] >> id % 32 & 1u) == 0) return nullptr;
    return space.adjusted + (std::lower_bound(space.few_ids, space.few_ids + space.count, id) - space.few_ids);
}

const float* adjust_logits(const float* logits, const SampleRules& rules, bool infinite, Workspace& space) {
    if (rules.mask == nullptr && rules.bias_size + rules.history_size + rules.dry_size == 0 && !infinite) return logits;
    if (rules.mask == nullptr) {
        std::memcpy(space.adjusted, logits, static_cast<size_t>(space.count) * sizeof(float));
    } else {
        apply_mask(logits, rules, space);
    }
    for (int64_t i = 0; infinite && i < space.count; ++i) space.adjusted[i] = bound_logit(space.adjusted[i]);
    for (int64_t i = 0; i < rules.bias_size; ++i) {
        float* const logit = find_logit(rules.bias_ids[i], rules, space);
        if (logit == nullptr) continue;
        *logit = bound_logit(static_cast<double>(*logit) + static_cast<double>(rules.bias_values[i]));
    }
    for (int64_t i = 0; i < rules.history_size; ++i) {
        float* const logit = find_logit(rules.history_ids[i], rules, space);
        if (logit == nullptr) continue;
        const int32_t count = rules.history_counts[i];
        double value = *logit;
        value = value > 0 ? value / rules.repetition_penalty : value * rules.repetition_penalty;
        value -= (count > 0 ? rules.presence_penalty : 0.0) + rules.frequency_penalty * count;
        *logit = bound_logit(value);
    }
    for (int64_t i = 0; i < rules.dry_size; ++i) {
        float* const logit = find_logit(rules.dry_ids[i], rules, space);
        if (logit != nullptr) *logit = bound_logit(static_cast<double>(*logit) - rules.dry_penalties[i]);
    }
    return space.adjusted;
}

}  // namespace

int64_t sort_best(const float* logits, int64_t wanted, Workspace& space) {
    wanted = std::min(wanted, space.count);
    if (wanted == 0) return 0;
    float threshold = -kLargest;
    if (wanted <= space.blocks) {  // that many blocks have a logit of at least the wanted-th greatest peak
        std::copy_n(space.block_peaks, space.blocks, space.peak_order);
        std::nth_element(space.peak_order, space.peak_order + wanted - 1, space.peak_order + space.blocks,
                         [](float a, float b) { return a > b; });
        threshold = std::max(threshold, space.peak_order[wanted - 1]);
    }
    const int64_t found = space.table->collect_logits(logits, space.count, threshold, space.ids);
    const Before before{logits};
    if (wanted < found) std::nth_element(space.ids, space.ids + wanted, space.ids + found, before);
    std::sort(space.ids, space.ids + std::min(wanted, found), before);
    int64_t sorted = found;  // where a mask leaves few tokens, impossible ones fill up
    for (int64_t i = 0; sorted < wanted; ++i) {
        if (logits[i] == kNothing) space.ids[sorted++] = static_cast<int32_t>(i);
    }
    return wanted;
}

namespace {

// Draw among the `wanted` best candidates, sorted.
int32_t draw_among_best(const float* logits, float peak, float factor, const SampleRules& rules, int64_t wanted,
                        Workspace& space) {
    int64_t kept = sort_best(logits, wanted, space);
    for (int64_t i = 0; i < kept; ++i) space.terms[i] = logits[space.ids[i]];
    space.table->sum_exponentials(space.terms, kept, peak, factor, space.terms);
    if (rules.top_p < 1) {
        double total = 0, reached = 0;
        for (int64_t i = 0; i < kept; ++i) total += space.terms[i];
        int64_t i = 0;
        while (i < kept - 1 && (reached += space.terms[i]) < rules.top_p * total) ++i;
        kept = i + 1;
    }
    while (kept > 1 && (space.terms[kept - 1] < rules.min_p || space.terms[kept - 1] == 0)) --kept;
    double total = 0, reached = 0;
    for (int64_t i = 0; i < kept; ++i) total += space.terms[i];
    int64_t i = 0;
    while (i < kept - 1 && (reached += space.terms[i]) <= rules.uniform * total) ++i;
    return space.ids[i];
}

// Masses of candidates by how far they are below the peak; `terms` are their weights, 0 for those that are
// out.
class MassBins {
  public:
    MassBins(const float* logits, float peak, float factor, Workspace& space)
        : logits_(logits), peak_(peak), scale_(std::min(kBinsPerNat * factor, kLargest)), space_(space) {}

    // Sums all weights into their bins.
    void fill() {
        std::fill_n(space_.masses, kMassBins + kSpareBins, 0.0);
        for (int64_t i = 0; i < space_.count; ++i) {
            // What has no weight may go anywhere, and goes to several bins so that no addition waits for another.
            const int64_t aside = static_cast<int64_t>(space_.terms[i] == 0) * (1 + i % kSpareBins);
            space_.masses[bin_of(i) + aside] += space_.terms[i];
        }
        total_ = 0;
        for (int64_t bin = 0; bin < kMassBins; ++bin) total_ += space_.masses[bin];
    }

    // The candidate with which the sum of weights, in order of candidates, reaches `share` of all: the sum is
    // at least that (or above it, when `beyond`). The last candidate of any weight when rounding keeps the
    // sum below.
    int32_t find(double share, bool beyond) {
        const double target = share * total_;
        const auto reaches = [&](double sum) { return beyond ? sum > target : sum >= target; };
        int64_t bin = 0, last = 0;
        double sum = 0;
        for (; bin < kMassBins && !reaches(sum + space_.masses[bin]); ++bin) {
            sum += space_.masses[bin];
            if (space_.masses[bin] > 0) last = bin;
        }
        const int64_t members = collect(bin < kMassBins ? bin : last);
        if (bin == kMassBins) return space_.ids[members - 1];
        int64_t i = 0;
        while (i < members - 1 && !reaches(sum += space_.terms[space_.ids[i]])) ++i;
        return space_.ids[i];
    }

    // Takes out every candidate after `last`.
    void cut_after(int32_t last) {
        const Before before{logits_};
        for (int64_t i = 0; i < space_.count; ++i) {
            if (before(last, static_cast<int32_t>(i))) space_.terms[i] = 0;
        }
    }

  private:
    int64_t bin_of(int64_t i) const {
        // Not below zero, so its bits compare as integers: the compiler makes no branch of that.
        const float distance = (peak_ - logits_[i]) * scale_;
        const int32_t bound = std::bit_cast<int32_t>(static_cast<float>(kMassBins - 1));
        return static_cast<int64_t>(std::bit_cast<float>(std::min(std::bit_cast<int32_t>(distance), bound)));
    }

    // The candidates of a bin that have weight, in order, at the start of ids.
    int64_t collect(int64_t bin) {
        int64_t members = 0;
        for (int64_t i = 0; i < space_.count; ++i) {
            if (bin_of(i) == bin && space_.terms[i] > 0) space_.ids[members++] = static_cast<int32_t>(i);
        }
        std::sort(space_.ids, space_.ids + members, Before{logits_});
        return members;
    }

    const float* logits_;
    float peak_, scale_;
    double total_ = 0;
    Workspace& space_;
};

}  // namespace

int32_t draw_among_all(const float* logits, float peak, float factor, const SampleRules& rules, Workspace& space) {
    space.table->sum_exponentials(logits, space.count, peak, factor, space.terms);
    MassBins bins(logits, peak, factor, space);
    if (rules.top_p < 1) {
        bins.fill();
        bins.cut_after(bins.find(rules.top_p, false));
    }
    for (int64_t i = 0; rules.min_p > 0 && i < space.count; ++i) {
        if (space.terms[i] < rules.min_p) space.terms[i] = 0;
    }
    bins.fill();
    return bins.find(rules.uniform, true);
}

namespace {

// The place of the candidate that is drawn.
int32_t draw_candidate(const float* logits, float peak, const SampleRules& rules, Workspace& space) {
    const float factor = static_cast<float>(std::min(1.0 / rules.temperature, static_cast<double>(kLargest)));
    if (rules.top_k > 0 && rules.top_k < space.count) {
        return draw_among_best(logits, peak, factor, rules, rules.top_k, space);
    }
    if (space.is_few) return draw_among_best(logits, peak, factor, rules, space.count, space);
    return draw_among_all(logits, peak, factor, rules, space);
}

double sum_weights(const float* logits, float peak, const Workspace& space) {
    if (!space.is_few) return space.table->sum_exponentials(logits, space.count, peak, 1.0f, nullptr);
    return space.table->sum_few_exponentials(logits, space.few_ids, space.count, peak, space.terms);
}

void sample_row(const SampleCall& call, int64_t row, Workspace space) {
    const SampleRules& rules = call.rules[row];
    SampleOutcome& outcome = call.outcomes[row];
    outcome.fault = SampleFault::none;
    outcome.surprise = 0;
    const float* logits = call.logits + row * call.vocabulary;
    LogitScan scan = space.table->scan_logits(logits, call.vocabulary, space.block_peaks);
    if (scan.not_number >= 0) {
        outcome.fault = SampleFault::not_number;
        outcome.fault_id = scan.not_number;
        return;
    }
    const float* const adjusted = adjust_logits(logits, rules, scan.peak > kLargest, space);
    if (adjusted != logits) scan = space.table->scan_logits(adjusted, space.count, space.block_peaks);
    if (scan.peak == kNothing) {
        outcome.token_id = kNoToken;
        outcome.logprob = kNothing;
        return;
    }
    const double log_total = std::log(sum_weights(adjusted, scan.peak, space));
    const auto logprob_of = [&](int64_t place) {
        return static_cast<double>(adjusted[place]) - static_cast<double>(scan.peak) - log_total;
    };
    SampleChoice choice{scan.best, 0};
    if (has_other_rules(rules)) {
        choice = choose_by_rules(adjusted, scan, rules, space);
    } else if (rules.temperature > 0) {
        choice.place = draw_candidate(adjusted, scan.peak, rules, space);
    }
    const int64_t chosen = choice.place;
    outcome.surprise = choice.surprise;
    outcome.token_id = space.id_of(chosen);
    outcome.logprob = logprob_of(chosen);
    const int64_t best = sort_best(adjusted, rules.top_logprobs, space);
    for (int64_t i = 0; i < best; ++i) {
        call.top_ids[row * call.top_width + i] = space.id_of(space.ids[i]);
        call.top_logprobs[row * call.top_width + i] = logprob_of(space.ids[i]);
    }
}

}  // namespace

void run_sample(Runtime& runtime, const SampleCall& call) {
    const bool random = std::any_of(call.rules, call.rules + call.rows,
                                    [](const SampleRules& rules) { return rules.temperature != 0; });
    Counted counted(runtime.tally, {OperatorName::sample, KernelName::plain, random ? 1 : 0});
    counted.does([&] {
        const int64_t bytes = call.rows * call.vocabulary * static_cast<int64_t>(sizeof(float));
        return Tally::Work{.nanoseconds = 0, .bytes = bytes, .macs = 0};
    });
    const OperatorTable* const table = operator_table(runtime.isa);
    const int64_t bytes = workspace_bytes(call.vocabulary);
    const int64_t threads = std::min<int64_t>(runtime.pool.threads(), call.rows);
    std::byte* const scratch = runtime.scratch(Scratch::sample, static_cast<size_t>(bytes * runtime.pool.threads()));
    const auto run_row = [&](int row, int thread) {
        sample_row(call, row, lay_out_workspace(scratch + thread * bytes, call.vocabulary, table));
    };
    if (threads == 1) {
        for (int64_t row = 0; row < call.rows; ++row) run_row(static_cast<int>(row), 0);
    } else {
        runtime.pool.parallel_for(static_cast<int>(call.rows), run_row);
    }
}

}  // namespace mlxr
