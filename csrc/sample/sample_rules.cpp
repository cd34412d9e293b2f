// The rules of sample that need more than the head of the order of candidates; see
// src/mlxr/kernels/sample/__init__.py. Wherever a rule bounds how many candidates can be left, only those are sorted;
// where none does, the order is never made: XTC takes a few out, and the draw is that of sample.cpp. Sums are in double
// and in one order.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "sample/sample_order.h"
#include "sample/sample_workspace.h"

namespace mlxr {

namespace {

constexpr int64_t kMirostatCandidates = 100;
constexpr int64_t kFirstSorted = 256;
constexpr double kSlack = 1e-4;     // in nats: more than the rounding of a weight
constexpr double kRounding = 1e-6;  // more than that of a logit

float factor_of(double temperature) {
    return static_cast<float>(std::min(1.0 / temperature, static_cast<double>(kLargest)));
}

// A logit at or below that of every candidate with the weight e**`log_weight`.
float find_floor(float peak, double log_weight, float factor) {
    const double logit = peak + (log_weight - kSlack) / factor;
    const double least = logit - kRounding * (std::abs(logit) + std::abs(peak));
    return static_cast<float>(std::clamp<double>(least, -kLargest, peak));
}

bool drops_by_chance(const SampleRules& rules) {
    return rules.xtc_probability > 0 && rules.xtc_threshold <= 0.5;
}

// The lowest logit that top_n_sigma leaves.
float find_sigma_floor(const float* logits, float peak, double sigmas, const Workspace& space) {
    double sum = 0, squares = 0;
    int64_t finite = 0;
    for (int64_t i = 0; i < space.count; ++i) {
        if (logits[i] == kNothing) continue;
        sum += logits[i];
        ++finite;
    }
    const double mean = sum / static_cast<double>(finite);
    for (int64_t i = 0; i < space.count; ++i) {
        if (logits[i] == kNothing) continue;
        squares += (logits[i] - mean) * (logits[i] - mean);
    }
    const double least = peak - sigmas * std::sqrt(squares / static_cast<double>(finite));
    float floor = static_cast<float>(std::max(least, -static_cast<double>(kLargest)));
    if (floor < least) floor = std::nextafter(floor, kLargest);
    return std::min(floor, peak);
}

// Entropy in nats of candidates with `weights` and `logits` below `peak`, and how many they are.
struct Entropy {
    double nats;
    int64_t candidates;
};

template <typename Logit, typename Weight>
Entropy measure_entropy(int64_t count, double factor, double peak, Logit logit, Weight weight) {
    double sums[4] = {}, moments[4] = {};
    int64_t candidates = 0;
    const auto add = [&](int64_t i, int64_t lane) {
        const float value = logit(i);
        const double mass = weight(i);
        sums[lane] += mass;  // impossible ones have none
        moments[lane] += mass * ((std::max(value, -kLargest) - peak) * factor);
        candidates += static_cast<int64_t>(value != kNothing);
    };
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        for (int64_t lane = 0; lane < 4; ++lane) add(i + lane, lane);
    }
    for (; i < count; ++i) add(i, i % 4);
    const double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    const double moment = (moments[0] + moments[1]) + (moments[2] + moments[3]);
    return {std::log(sum) - moment / sum, candidates};
}

double find_temperature(const SampleRules& rules, const Entropy& entropy) {
    if (entropy.candidates <= 1) return rules.temperature;
    const double low = std::max(0.0, rules.temperature - rules.dynatemp_range);
    const double high = rules.temperature + rules.dynatemp_range;
    const double share = std::clamp(entropy.nats / std::log(static_cast<double>(entropy.candidates)), 0.0, 1.0);
    return low + (high - low) * std::pow(share, rules.dynatemp_exponent);
}

// Leaves, of `count` candidates, those whose surprise is nearest to the mean one, as many as go beyond the share.
// `place` and `weight` say which they are; their places are moved to the start of space.ids. Returns how many.
class TypicalCut {
  public:
    TypicalCut(const float* logits, float peak, double factor, const Entropy& entropy, double total, Workspace& space)
        : logits_(logits), space_(space), peak_(peak), factor_(factor), shift_(std::log(total) - entropy.nats) {}

    template <typename Place, typename Weight>
    int64_t cut(int64_t count, double target, Place place, Weight weight) {
        std::fill_n(space_.masses, kMassBins, 0.0);
        for (int64_t i = 0; i < count; ++i) {
            if (weight(i) > 0) space_.masses[bin_of(distance_of(place(i)))] += weight(i);
        }
        int64_t border = 0;
        double reached = 0;
        while (border < kMassBins - 1 && reached + space_.masses[border] <= target) reached += space_.masses[border++];
        std::vector<std::pair<double, int32_t>> at_border;
        int64_t kept = 0;
        for (int64_t i = 0; i < count; ++i) {
            const int32_t here = place(i);
            const double distance = distance_of(here);
            const int64_t bin = bin_of(distance);
            if (bin == border && weight(i) > 0) at_border.emplace_back(distance, here);
            if (bin < border && weight(i) > 0) space_.ids[kept++] = here;
        }
        const Before before{logits_};
        std::sort(at_border.begin(), at_border.end(), [&](const auto& a, const auto& b) {
            return a.first != b.first ? a.first < b.first : before(a.second, b.second);
        });
        for (const auto& [distance, here] : at_border) {
            if (reached > target) break;
            reached += std::exp((logits_[here] - static_cast<double>(peak_)) * factor_);
            space_.ids[kept++] = here;
        }
        return kept;
    }

  private:
    double distance_of(int32_t place) const {
        return std::abs(shift_ - (logits_[place] - static_cast<double>(peak_)) * factor_);
    }
    static int64_t bin_of(double distance) {
        return static_cast<int64_t>(std::min(distance * kBinsPerNat, static_cast<double>(kMassBins - 1)));
    }

    const float* logits_;
    Workspace& space_;
    float peak_;
    double factor_, shift_;
};

// The state of one choice.
class Rules {
  public:
    Rules(const float* logits, const LogitScan& scan, const SampleRules& rules, Workspace& space)
        : logits_(logits), scan_(scan), rules_(rules), space_(space), sorted_(logits, space) {
        const bool comes_last = rules.temperature_last || rules.dynatemp_range > 0 || rules.temperature == 0;
        factor_ = comes_last ? 1.0f : factor_of(rules.temperature);
        if (rules.top_n_sigma > 0) floor_ = find_sigma_floor(logits, scan.peak, rules.top_n_sigma, space);
    }

    SampleChoice choose() {
        if (rules_.mirostat != 0 && rules_.temperature > 0) return choose_by_mirostat();
        const bool has_few = space_.is_few || (rules_.top_k > 0 && rules_.top_k < space_.count);
        const bool cuts = rules_.top_p < 1 || rules_.min_p > 0 || rules_.typical_p < 1 || rules_.top_n_sigma > 0;
        if (!has_few && !cuts) return {choose_among_all(), 0};
        if (has_few) {
            sorted_.take_best(rules_.top_k > 0 ? rules_.top_k : space_.count, floor_);
            if (rules_.typical_p < 1) keep_typical_sorted();
            cut_sorted(sorted_.weigh(factor_));
        } else if (rules_.typical_p < 1) {
            keep_typical();
            cut_sorted(sorted_.weigh(factor_));
        } else {
            cut_sorted(take_head());
        }
        return {choose_among_sorted(), 0};
    }

  private:
    // Sorts as many as top_n_sigma, top_p and min_p may leave; returns the weight that top_p is a share of.
    double take_head() {
        if (floor_ > -kLargest && rules_.top_p < 1) {
            sorted_.take_above(floor_);
            return sorted_.weigh(factor_);
        }
        const double total =
            rules_.top_p < 1 ? space_.table->sum_exponentials(logits_, space_.count, scan_.peak, factor_, nullptr) : 0;
        if (rules_.min_p > 0 || floor_ > -kLargest) {
            sorted_.take_above(std::max(floor_, find_floor(scan_.peak, std::log(rules_.min_p), factor_)));
            sorted_.weigh(factor_);
            return total;
        }
        for (int64_t wanted = kFirstSorted;; wanted *= 8) {
            sorted_.take_best(wanted, floor_);
            if (sorted_.weigh(factor_) >= rules_.top_p * total || wanted >= space_.count) return total;
        }
    }

    // top_p of `total`, then min_p, by the weights of sorted_.
    void cut_sorted(double total) {
        if (rules_.top_p < 1) sorted_.cut_top_p(rules_.top_p * total);
        sorted_.cut_min_p(rules_.min_p);
    }

    void keep_typical_sorted() {
        const double total = sorted_.weigh(factor_);
        const auto weight = [&](int64_t i) { return sorted_.weight(i); };
        const Entropy entropy =
            measure_entropy(sorted_.size(), factor_, scan_.peak, [&](int64_t i) { return sorted_.logit(i); }, weight);
        const std::vector<int32_t> places(space_.ids, space_.ids + sorted_.size());
        TypicalCut cut(logits_, scan_.peak, factor_, entropy, total, space_);
        sorted_.take_listed(cut.cut(
            sorted_.size(), rules_.typical_p * total, [&](int64_t i) { return places[static_cast<size_t>(i)]; },
            weight));
    }

    void keep_typical() {
        space_.table->sum_exponentials(logits_, space_.count, scan_.peak, factor_, space_.terms);
        const auto logit = [&](int64_t i) { return logits_[i] >= floor_ ? logits_[i] : kNothing; };
        const auto weight = [&](int64_t i) { return logits_[i] >= floor_ ? space_.terms[i] : 0.0f; };
        const Entropy entropy = measure_entropy(space_.count, factor_, scan_.peak, logit, weight);
        double total = 0;
        for (int64_t i = 0; i < space_.count; ++i) total += weight(i);
        TypicalCut cut(logits_, scan_.peak, factor_, entropy, total, space_);
        sorted_.take_listed(
            cut.cut(space_.count, rules_.typical_p * total, [](int64_t i) { return static_cast<int32_t>(i); }, weight));
    }

    // XTC, the temperature and the draw, among sorted_.
    int64_t choose_among_sorted() {
        if (drops_by_chance(rules_) && rules_.chance <= rules_.xtc_probability) {
            const int64_t likely = sorted_.count_likely(rules_.xtc_threshold * sorted_.weigh(factor_));
            if (likely > 1) sorted_.skip(likely - 1);
        }
        double temperature = rules_.temperature;
        if (rules_.dynatemp_range > 0) {
            sorted_.weigh(1.0f);
            temperature = find_temperature(
                rules_, measure_entropy(
                            sorted_.size(), 1.0, sorted_.logit(0), [&](int64_t i) { return sorted_.logit(i); },
                            [&](int64_t i) { return sorted_.weight(i); }));
        }
        if (temperature == 0) return sorted_.place(0);
        sorted_.weigh(factor_of(temperature));
        return sorted_.place(sorted_.draw(rules_.uniform));
    }

    // The same where nothing bounds how many are left: those that XTC drops are out for the time of the draw.
    int64_t choose_among_all() {
        std::vector<std::pair<int32_t, float>> dropped;
        float peak = scan_.peak;
        int64_t best = scan_.best;
        const float* logits = logits_;
        if (drops_by_chance(rules_) && rules_.chance <= rules_.xtc_probability) {
            const double total = space_.table->sum_exponentials(logits, space_.count, peak, factor_, nullptr);
            sorted_.take_above(find_floor(peak, std::log(rules_.xtc_threshold * total), factor_));
            sorted_.weigh(factor_);
            const int64_t likely = sorted_.count_likely(rules_.xtc_threshold * total);
            for (int64_t i = 0; i < likely - 1; ++i) dropped.emplace_back(sorted_.place(i), sorted_.logit(i));
            if (!dropped.empty()) {
                best = sorted_.place(likely - 1);
                peak = logits_[best];
                if (logits_ != space_.adjusted) {
                    std::memcpy(space_.adjusted, logits_, static_cast<size_t>(space_.count) * sizeof(float));
                    logits = space_.adjusted;
                }
                for (const auto& [place, logit] : dropped) space_.adjusted[place] = kNothing;
            }
        }
        const int64_t chosen = draw_without_cuts(logits, peak, best);
        for (const auto& [place, logit] : dropped) space_.adjusted[place] = logit;
        return chosen;
    }

    int64_t draw_without_cuts(const float* logits, float peak, int64_t best) {
        double temperature = rules_.temperature;
        if (rules_.dynatemp_range > 0) {
            space_.table->sum_exponentials(logits, space_.count, peak, 1.0f, space_.terms);
            temperature = find_temperature(rules_, measure_entropy(
                                                       space_.count, 1.0, peak, [&](int64_t i) { return logits[i]; },
                                                       [&](int64_t i) { return space_.terms[i]; }));
        }
        if (temperature == 0) return best;
        return draw_among_all(logits, peak, factor_of(temperature), rules_, space_);
    }

    SampleChoice choose_by_mirostat() {
        const float factor = factor_of(rules_.temperature);
        if (rules_.mirostat == 1) {
            sorted_.take_best(kMirostatCandidates, kNothing);
            const int64_t kept = count_for_mirostat(factor);
            sorted_.take_best(kept, kNothing);
            sorted_.weigh(factor);
        } else {
            const double total = space_.table->sum_exponentials(logits_, space_.count, scan_.peak, factor, nullptr);
            const double least = std::exp2(-rules_.surprise_bound) * total;
            sorted_.take_above(find_floor(scan_.peak, std::log(least), factor));
            sorted_.weigh(factor);
            sorted_.keep(sorted_.count_likely(least));
        }
        const int64_t drawn = sorted_.draw(rules_.uniform);
        return {sorted_.place(drawn), -std::log2(sorted_.weight(drawn) / sorted_.total())};
    }

    int64_t count_for_mirostat(float factor) const {
        int64_t possible = 0;
        for (int64_t i = 0; i < space_.count; ++i) possible += static_cast<int64_t>(logits_[i] != kNothing);
        double products = 0, squares = 0;
        for (int64_t i = 0; i + 1 < sorted_.size(); ++i) {
            const double step = std::log(static_cast<double>(i + 2) / static_cast<double>(i + 1));
            const double fall = (static_cast<double>(sorted_.logit(i)) - sorted_.logit(i + 1)) * factor;
            products += step * fall;
            squares += step * step;
        }
        if (sorted_.size() < 2) return 1;
        const double exponent = products / squares, excess = exponent - 1;
        const double kept = std::pow(
            (excess * std::exp2(rules_.surprise_bound)) / (1 - std::pow(static_cast<double>(possible), -excess)),
            1 / exponent);
        if (std::isnan(kept)) return 1;
        return static_cast<int64_t>(std::clamp(kept, 1.0, static_cast<double>(possible)));
    }

    const float* logits_;
    LogitScan scan_;
    const SampleRules& rules_;
    Workspace& space_;
    Sorted sorted_;
    float factor_ = 1.0f, floor_ = -kLargest;
};

}  // namespace

bool has_other_rules(const SampleRules& rules) {
    const bool drops_likeliest = rules.typical_p < 1 || drops_by_chance(rules);
    if (rules.temperature == 0 && rules.dynatemp_range == 0) return rules.mirostat == 0 && drops_likeliest;
    const bool comes_late = rules.temperature_last && rules.temperature != 1 && (rules.top_p < 1 || rules.min_p > 0);
    return rules.mirostat != 0 || rules.dynatemp_range > 0 || rules.top_n_sigma > 0 || drops_likeliest || comes_late;
}

SampleChoice choose_by_rules(const float* logits, const LogitScan& scan, const SampleRules& rules, Workspace& space) {
    return Rules(logits, scan, rules, space).choose();
}

}  // namespace mlxr
