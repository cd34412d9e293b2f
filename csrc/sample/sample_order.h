// The head of the order of a row's candidates, as rules of sampling shorten it. Included by sample_rules.cpp alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sample/sample_workspace.h"

namespace mlxr {

// Candidates in order, as places in space.ids from `first` on, with their weights in space.terms.
class Sorted {
  public:
    Sorted(const float* logits, Workspace& space) : logits_(logits), space_(space) {}

    int64_t size() const { return size_; }
    int32_t place(int64_t i) const { return space_.ids[first_ + i]; }
    float logit(int64_t i) const { return logits_[place(i)]; }
    double weight(int64_t i) const { return space_.terms[first_ + i]; }

    // The first `wanted` of all, without impossible ones and those below `floor`.
    void take_best(int64_t wanted, float floor) {
        first_ = 0;
        size_ = sort_best(logits_, wanted, space_);
        while (size_ > 1 && !(logit(size_ - 1) >= floor && logit(size_ - 1) != kNothing)) --size_;
    }

    // All from `floor` on.
    void take_above(float floor) {
        first_ = 0;
        size_ = space_.table->collect_logits(logits_, space_.count, floor, space_.ids);
        std::sort(space_.ids, space_.ids + size_, Before{logits_});
    }

    // The first `count` places in space.ids, which are not sorted.
    void take_listed(int64_t count) {
        first_ = 0;
        size_ = count;
        std::sort(space_.ids, space_.ids + size_, Before{logits_});
    }

    // Weights relative to the first, and their sum.
    double weigh(float factor) {
        float* const terms = space_.terms + first_;
        for (int64_t i = 0; i < size_; ++i) terms[i] = logit(i);
        space_.table->sum_exponentials(terms, size_, logit(0), factor, terms);
        return total();
    }

    double total() const {
        double sum = 0;
        for (int64_t i = 0; i < size_; ++i) sum += weight(i);
        return sum;
    }

    void keep(int64_t count) { size_ = std::max<int64_t>(count, 1); }

    void skip(int64_t count) {
        first_ += count;
        size_ -= count;
    }

    void cut_top_p(double target) {
        double reached = 0;
        int64_t i = 0;
        while (i < size_ - 1 && (reached += weight(i)) < target) ++i;
        size_ = i + 1;
    }

    void cut_min_p(double least) {
        while (size_ > 1 && weight(size_ - 1) < least) --size_;
    }

    int64_t count_likely(double least) const {
        int64_t likely = 0;
        while (likely < size_ && weight(likely) >= least) ++likely;
        return likely;
    }

    // By weights that are there; the first whose cumulative weight exceeds the share.
    int64_t draw(double uniform) const {
        const double sum = total();
        double reached = 0;
        int64_t i = 0;
        while (i < size_ - 1 && (reached += weight(i)) <= uniform * sum) ++i;
        return i;
    }

  private:
    const float* logits_;
    Workspace& space_;
    int64_t first_ = 0, size_ = 0;
};

}  // namespace mlxr
