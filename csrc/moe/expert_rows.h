// The rows of a mixture that adapters update, by the expert that they go to and the adapter that they have, so that the
// matrices of each are read once. Knows no Python.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lora/adapter.h"
#include "moe/experts.h"

namespace mlxr {

// Consecutive tokens, sorted by expert, of one expert.
struct ExpertGroup {
    int64_t expert, first, rows;
    bool gated;                                // gate, up and activation in one go
    float *x = nullptr, *activated = nullptr;  // rows that products read as floats, or null
};

class ExpertRows {
  public:
    // An adapter and its rows of one group: by their tokens, and by their places in the group. Both are in one order.
    struct Share {
        AdapterRows by_token, by_place;
    };

    // `places` (tokens, used) are those of each token and rank, `owners` the group of each. What an adapter does not
    // change is left out. Throws std::bad_alloc.
    ExpertRows(const Experts& experts, std::span<const AdapterRows> adapters, int64_t used,
               std::span<const ExpertGroup> groups, std::span<const int32_t> places, std::span<const int32_t> owners);

    std::span<const Share> of(size_t group) const {
        if (shares_.empty()) return {};
        return std::span(shares_).subspan(firsts_[group], firsts_[group + 1] - firsts_[group]);
    }

  private:
    std::vector<Share> shares_;   // group after group
    std::vector<size_t> firsts_;  // of each group, and their number
    std::vector<int32_t> tokens_, rows_;
};

}  // namespace mlxr
