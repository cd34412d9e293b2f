// Low-rank adapters: which weights one updates, by matrices laid out for the kernels, and the updates of a product's
// rows. How they are cut for the threads never shows in the result. Knows no Python.
#pragma once

#include <cstdint>
#include <span>
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
    // must be checked; all updates of a weight follow one another. Throws std::bad_alloc.
    void append(const LinearWeight* weight, LowRank update, const void* a, const void* b);

    // The updates of a weight, which have no output in common; of null, that of the table of embeddings.
    std::span<const LowRank> find(const LinearWeight* weight) const;

    int64_t bytes() const { return bytes_; }

  private:
    // Those of a weight, by its number, one after another: steps ask for weights in the order of their numbers, and
    // find nothing of this in a cache.
    struct Place {
        int32_t first, count;
    };
    std::vector<LowRank> updates_, table_;
    std::vector<Place> places_;
    int64_t first_number_ = 0;
    Slices memory_;
    int64_t bytes_ = 0;
};

// Rows of a batch that an adapter updates, `factor` times. A row may be that of several, which are added in their
// order: each has a later `round` than the one before. Rounds begin with 0 and rise by at most one.
struct AdapterRows {
    const Adapter* adapter;
    const int32_t* rows;
    int64_t count;
    float factor = 1.0f;
    int round = 0;
    const float* looked_up = nullptr;  // (count, rank): of the table of embeddings, if it updates that
};

// One half of the updates of a product: blocks of a, or of b, times rows, cut for the threads by what they cost.
class LoraHalf {
  public:
    using Run = void (*)(const LoraCall&, int64_t, int64_t, int64_t, int64_t);

    // A call's blocks of so many numbers each. The call must stay where it is.
    void add(const LoraCall& call, int64_t blocks, int64_t numbers);

    void clear() {
        works_.clear();
        cost_ = 0;
    }

    // So many parts are worth their threads.
    int count_parts(int threads) const;
    void run(Run run, int part, int parts) const;

  private:
    // `cost` is that of a block and share of the rows.
    struct Work {
        const LoraCall* call;
        int64_t blocks, shares, cost;
    };

    std::vector<Work> works_;
    int64_t cost_ = 0;
};

// Updates of some rows, and the round of each.
struct LoraCalls {
    std::vector<LoraCall> calls;
    std::vector<int> rounds;
};

// What adapters add to the products of a batch, one after another, or to several at a time. The caller holds the
// runtime's mutex as long as this lives. One at a time is between its beginning and its end.
class ProductUpdates {
  public:
    ProductUpdates(Runtime& runtime, std::span<const AdapterRows> adapters);
    ProductUpdates(const ProductUpdates&) = delete;
    ProductUpdates& operator=(const ProductUpdates&) = delete;

    // Begins with `out` (rows, out_features), the product of `weight` and x. Returns what must be done when x is there,
    // beside the product or after it; null where nothing is added. Throws std::bad_alloc.
    const Beside* begin(const LinearWeight& weight, const float* x, float* out);

    // The rest, when that and the product are done.
    void finish();

    // The same of several products with rows that `adapter` lists: `add` each of them after `clear`, then `start`. Row
    // n of those in x becomes out_rows[n] of `out`; both lists must stay.
    void clear();
    void add(const LinearWeight& weight, const AdapterRows& adapter, const int32_t* out_rows, const float* x,
             float* out);
    const Beside* start();

    // `finish` within an operator that counts itself.
    void finish_within();

  private:
    Runtime& runtime_;
    const OperatorTable& table_;
    std::span<const AdapterRows> adapters_;
    LoraCalls calls_;
    LoraHalf reduces_;
    std::vector<LoraHalf> expands_;  // of each round
    Beside beside_{};
};

// All of it, to a product that is done. The same holds.
void update_product(Runtime& runtime, const LinearWeight& weight, std::span<const AdapterRows> adapters, const float* x,
                    float* out);

// Adds to embeddings (rows, columns) what adapters have for their tokens. The same holds.
void update_embeddings(Runtime& runtime, std::span<const AdapterRows> adapters, float* out, int64_t columns);

}  // namespace mlxr
