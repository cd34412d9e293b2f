// A mixture of experts: which experts each token has, and what they make of it. Experts are feed-forward blocks; tokens
// are grouped by expert, so that the weights of each are read once, and added up token by token. The bits of a token
// depend on nothing else: not on how many tokens an expert has, nor on the kernels that multiply them.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "linear/linear.h"
#include "lora/adapter.h"
#include "operators/operator_table.h"
#include "runtime/runtime.h"

namespace mlxr {

// Memory for the weights of some experts of a layer, which all have the same parts; those of the others stay in their
// file. One that is needed takes the place of the one whose last use is longest ago. Used by one thread at a time.
class ExpertSlots {
  public:
    // `count` slots, with the first experts in them, so that their memory is taken from now on. up[i] and down[i] are
    // those of expert i, left in their file. The caller holds the runtime's mutex. Throws std::bad_alloc.
    ExpertSlots(Runtime& runtime, std::vector<LinearWeight*> up, std::vector<LinearWeight*> down, int64_t count);

    int64_t count() const { return static_cast<int64_t>(slots_.size()); }

    // Loads these experts, at most count() of them, all different. The caller holds the runtime's mutex.
    void hold(Runtime& runtime, std::span<const int64_t> experts);

    // The other answer each time: whether the experts of a step that needs more than there are slots come last first,
    // so that it begins with those that the step before ended with.
    bool turn() { return turned_ = !turned_; }

    // Experts that were read from the file since. From any thread.
    int64_t reads() const { return reads_.load(std::memory_order_relaxed); }

  private:
    struct Slot {
        Slice up, down;
        int64_t expert = -1;
        uint64_t last_use = 0;
    };
    Slot& find_victim();
    void clear(Slot& slot);

    std::vector<LinearWeight*> up_, down_;
    std::vector<Slot> slots_;
    std::vector<int64_t> places_;  // of each expert: its slot, or -1
    uint64_t now_ = 0;
    bool turned_ = false;
    std::atomic<int64_t> reads_{0};
};

// What was sent to the experts of a layer. Written by one thread, read by any.
class ExpertUse {
  public:
    void append() { rows_.emplace_back(0); }
    void add_step(int64_t groups) {
        bump(steps_, 1);
        bump(groups_, groups);
    }
    void add_rows(int64_t expert, int64_t rows) { bump(rows_[static_cast<size_t>(expert)], rows); }

    int64_t rows(int64_t expert) const { return rows_[static_cast<size_t>(expert)].load(std::memory_order_relaxed); }
    int64_t steps() const { return steps_.load(std::memory_order_relaxed); }
    int64_t groups() const { return groups_.load(std::memory_order_relaxed); }

  private:
    static void bump(std::atomic<int64_t>& value, int64_t by) {
        value.store(value.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
    }
    std::deque<std::atomic<int64_t>> rows_;
    std::atomic<int64_t> steps_{0}, groups_{0};  // groups: experts that had rows, over all steps
};

// Feed-forward blocks of one shape, whose weights others keep.
class Experts {
  public:
    explicit Experts(Activation kind, const ActivationParameters& parameters = {})
        : kind_(kind), parameters_(parameters) {}

    // `up` is gate and up, or up alone, which has as many outputs as `down` inputs. Throws std::invalid_argument for
    // shapes that do not fit.
    void append(LinearWeight& up, LinearWeight& down);

    // Keeps so many of them in memory at a time, of weights that were left in their file. Throws std::invalid_argument
    // unless all of them have the same parts and there are so many, std::bad_alloc.
    void limit(Runtime& runtime, int64_t slots);

    int64_t count() const { return static_cast<int64_t>(up_.size()); }
    int64_t columns() const { return up_[0]->in_features(); }
    int64_t features() const { return down_[0]->in_features(); }
    bool is_gated() const { return up_[0]->out_features() != features(); }
    Activation kind() const { return kind_; }
    const ActivationParameters& parameters() const { return parameters_; }
    const LinearWeight& up(int64_t expert) const { return *up_[static_cast<size_t>(expert)]; }
    const LinearWeight& down(int64_t expert) const { return *down_[static_cast<size_t>(expert)]; }

    // Null where all are in memory.
    ExpertSlots* slots() const { return slots_.get(); }
    ExpertUse& use() const { return *use_; }

  private:
    Activation kind_;
    ActivationParameters parameters_;
    std::vector<LinearWeight*> up_, down_;
    std::unique_ptr<ExpertSlots> slots_;
    std::unique_ptr<ExpertUse> use_ = std::make_unique<ExpertUse>();
};

struct MixCall {
    const float* x;         // (tokens, columns)
    const int32_t* chosen;  // (tokens, used): experts
    const float* shares;    // (tokens, used)
    int64_t tokens, used;
    float* out;  // (tokens, columns)
    std::span<const AdapterRows> adapters = {};
};

// Fills call.chosen and call.shares for `rows` rows. The caller holds the runtime's mutex.
void run_route(Runtime& runtime, const RouteCall& call, int64_t rows);

// out[t] = the sum over ranks of share * down(act(up(x[t]))) of that rank's expert, with the bits of multiply,
// activate and what adapters add to both products for each token alone. There is at least one expert, and all numbers
// in `chosen` are those of experts. The caller holds the runtime's mutex. Throws std::bad_alloc, and then has written
// nothing.
void run_mix(Runtime& runtime, const Experts& experts, const MixCall& call);

}  // namespace mlxr
