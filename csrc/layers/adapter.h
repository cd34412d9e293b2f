// Low-rank adapters: which weights one updates, by matrices laid out for the kernels, and the updates of a product's
// rows. How they are cut for the threads never shows in the result. Knows no Python.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "linear/linear.h"
#include "operators/operator_table.h"
#include "runtime/runtime.h"

namespace mlxr {

// The update of some outputs of a weight, the `made` ones from `first_column` on. A table has no `a`: what its b is
// multiplied by is looked up.
struct LowRank {
    LoraType type;
    int64_t columns, rank, made, first_column;
    float scale;
    Slice a, b;  // in tiles, see LoraCall
};

// Complete before it is used.
class Adapter {
  public:
    Adapter() = default;
    Adapter(const Adapter&) = delete;
    Adapter& operator=(const Adapter&) = delete;

    // `a` (rank, columns), or null, and `b` (rank, made) are numbers of the update's type, which are copied. All sizes
    // must be checked. Throws std::bad_alloc.
    void append(const LinearWeight* weight, LowRank update, const void* a, const void* b);

    // The updates of a weight, which have no output in common; of null, that of the table of embeddings.
    std::span<const LowRank> find(const LinearWeight* weight) const;

    int64_t bytes() const { return bytes_; }

  private:
    std::unordered_map<const LinearWeight*, std::vector<LowRank>> updates_;
    Slices memory_;
    int64_t bytes_ = 0;
};

// Rows of a batch that an adapter updates. No row is that of two.
struct AdapterRows {
    const Adapter* adapter;
    const int32_t* rows;
    int64_t count;
    const float* looked_up = nullptr;  // (count, rank): of the table of embeddings, if it updates that
};

// Adds to `out` (rows, out_columns), the product of `weight` and x, what adapters make of x. The caller holds the
// runtime's mutex. Throws std::bad_alloc.
void update_product(Runtime& runtime, const LinearWeight& weight, std::span<const AdapterRows> adapters, const float* x,
                    float* out);

// Adds to embeddings (rows, columns) what adapters have for their tokens. The same holds.
void update_embeddings(Runtime& runtime, std::span<const AdapterRows> adapters, float* out, int64_t columns);

}  // namespace mlxr
