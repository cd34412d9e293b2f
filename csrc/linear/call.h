// Products while they run, as their drivers share them: multiply.cpp (few tokens), panels.cpp (many), gated.cpp (gate,
// up and down in one). A driver takes one product or several at once, as those of experts are.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "linear/input.h"
#include "linear/linear.h"
#include "linear/repack.h"

namespace mlxr {

// Groups in a panel at most: 128 of up to 1.4 KB (f16 2.1) stay in a second-level cache beside the activations.
inline constexpr int64_t kPanelGroups = 128;

// From so many tokens on arithmetic bounds a product rather than memory: rows are shared out in small pieces.
inline constexpr int64_t kSomeTokens = 32;

// Up to so many values one thread makes and quantises the input, while the others read weights.
inline constexpr int64_t kAloneValues = 16384;

struct LinearCall {
    Runtime& runtime;
    const LinearWeight& weight;
    LinearInput input;
    float* out;
    int64_t out_stride = 0;  // from one token to the next, 0 for the outputs of the weight

    int64_t tokens() const { return input.tokens; }
    int64_t stride() const { return out_stride != 0 ? out_stride : weight.out_features(); }
};

inline const QuantKernels& kernels_of(const LinearCall& call, Type type) {
    return call.runtime.kernels->quant[static_cast<int>(type)];
}

inline const Activations& activations_of(const LinearCall& call, Type type) {
    const QuantKernels& kernels = kernels_of(call, type);
    return kernels.shorts ? call.input.shorts : kernels.spans ? call.input.spans : call.input.groups;
}

// Whether strips multiply a part of fewer than kManyTokens tokens, two blocks at a time.
inline bool uses_strips(const LinearCall& call, const LinearWeight::Part& part) {
    return !is_dense(part.type) && call.runtime.takes_strips &&
           call.tokens() >= kernels_of(call, part.type).strip_tokens;
}

// What multiplies a quantised part of fewer than kManyTokens tokens.
inline const RowsKernel& rows_kernel(const LinearCall& call, const LinearWeight::Part& part) {
    const QuantKernels& kernels = kernels_of(call, part.type);
    return uses_strips(call, part) ? kernels.strips : kernels.rows;
}

// What multiplies a part: the drivers go by it, and the ledger counts it.
inline KernelName choose_kernel(const LinearCall& call, const LinearWeight::Part& part) {
    if (is_dense(part.type)) return part.type == Type::bf16 ? KernelName::pairs : KernelName::dense;
    return call.tokens() < kManyTokens ? rows_kernel(call, part).name : KernelName::panels;
}

// What multiplies a part of a call, `gated` where panels are activated at once.
inline KernelName name_kernel(const LinearCall& call, const LinearWeight::Part& part, bool gated) {
    return gated ? KernelName::gated_panels : choose_kernel(call, part);
}

// Adds what a call runs, for the ledger.
void describe_call(const LinearCall& call, bool gated, Ran& ran);
Tally::Work measure_call(const LinearCall& call);

inline const float* bias_of(const LinearWeight::Part& part) {
    return part.bias.empty() ? nullptr : part.bias.data();
}

inline int64_t units_of(const LinearCall& call, Type type) {
    return units_of(call.runtime, type, call.weight.in_features());
}

inline int64_t panels_of(const LinearWeight::Part& part) {
    return (part.rows + kPanelRows - 1) / kPanelRows;
}

// A call whose activations lie in scratch memory, undefined so far, in the forms that its parts need.
LinearCall begin_call(Runtime& runtime, const LinearWeight& weight, const float* x, int64_t tokens, float* out,
                      Scratch use);

// Makes the input (if that is left to do) and quantises or narrows it, on all threads.
void prepare_together(const LinearCall& call, const MakeRows& make_rows);

// Blocks [first, last) of a part without panels: all tokens; or, of dense parts, tokens [first_token, last_token),
// first_token at the start of a tile.
void multiply_blocks(const LinearCall& call, const LinearWeight::Part& part, int64_t first, int64_t last);
void multiply_dense(const LinearCall& call, const LinearWeight::Part& part, int64_t first, int64_t last,
                    int64_t first_token, int64_t last_token);

// Fewer than kSomeTokens tokens in each call. Each thread reads one contiguous run of all weights, and then helps the
// others with the ends of theirs. `prepare`, unless it is null, makes the input: on the calling thread, while the
// others begin to read.
using Prepare = std::function<void()>;
void multiply_few(Runtime& runtime, std::span<const LinearCall> calls, const Prepare& prepare,
                  const Beside* beside = nullptr);

// Many tokens, whose input is prepared.
void multiply_many(const LinearCall& call);

// After a task with panels, on its thread.
inline void end_panels(const LinearCall& call) {
    if (call.runtime.kernels->end_panels != nullptr) call.runtime.kernels->end_panels();
}

// The groups of a weight in chunks of whole units, so that each fits into a panel.
struct PanelChunks {
    PanelChunks(const LinearCall& call, Type type);
    int64_t first_unit(int64_t chunk) const { return units * chunk / count; }
    int64_t units, unit_groups, count;
};

// Bytes of a panel that holds any chunk of any part.
int64_t panel_bytes_of(const LinearCall& call);

// Rows [32*index, 32*index+32) of one chunk of a part into a panel.
void unpack_panel(const LinearCall& call, const LinearWeight::Part& part, int64_t index, int64_t chunk, uint8_t* panel);

// Tokens [first, last), `first` at the start of a tile or in the only one, times that panel. `out` is the panel's first
// column of token `first`, where sums of the chunk before are found.
void multiply_panel(const LinearCall& call, const LinearWeight::Part& part, int64_t index, int64_t chunk,
                    const uint8_t* panel, int64_t first, int64_t last, float* out, int64_t out_stride);

// Weights that a thread unpacks next, which memory is asked for in shares while it multiplies: what is used for few
// tokens comes from memory often.
class Upcoming {
  public:
    // Panel `index` of a part, one chunk of it.
    void add(const LinearCall& call, const LinearWeight::Part& part, int64_t index, int64_t chunk);
    // Share `share` of `shares`; those past the last are empty.
    void fetch(int64_t share, int64_t shares) const;

  private:
    static constexpr int kMost = 4;  // blocks
    int count_ = 0;
    int64_t bytes_ = 0;  // of each
    const uint8_t* blocks_[kMost];
};

// What one thread takes at a time of products of many tokens.
struct Piece {
    const LinearCall* call;
    const LinearWeight::Part* part;
    int64_t first_panel, panels;
    int64_t first_token, last_token;
};

// Products of many tokens, whose input is prepared, in pieces: tasks for all threads.
class PieceTasks {
  public:
    // The calls must stay.
    PieceTasks(std::span<const LinearCall> calls, int threads);
    int count() const { return static_cast<int>(pieces_.size()); }
    int64_t scratch_bytes() const { return kPiecePanels * panel_bytes_; }  // of a thread
    // `next` is the task that the thread will probably do after it.
    void run(int task, int next, std::byte* scratch) const;

  private:
    static constexpr int64_t kPiecePanels = 2;
    void multiply(const Piece& piece, const Upcoming& next, uint8_t* panels) const;
    void cut(std::span<const LinearCall> calls, int threads);

    int64_t panel_bytes_ = 0;
    std::vector<Piece> pieces_;
};

// Gate and up of many tokens, activated and quantised for the product `down`.
struct GatedCall {
    const LinearCall& gate_up;
    const LinearCall& down;
    Activation kind;
    ActivationParameters parameters{};
};

// Whether that is possible: all parts in whole groups, 32 columns of gate and of up at a time.
bool can_gate(const LinearWeight& gate_up, const LinearWeight& down, int64_t tokens);

// The same of one or several, in tasks for all threads.
class GatedTasks {
  public:
    GatedTasks(std::vector<GatedCall> calls, int threads);
    int count() const { return static_cast<int>(runs_.size()); }
    int64_t scratch_bytes() const;  // of a thread
    // `next` is the task that the thread will probably do after it.
    void run(int task, int next, std::byte* scratch) const;

  private:
    // A span of the columns of down, and some tokens.
    struct Run {
        size_t call;
        int64_t index, first_token, last_token;
    };
    std::vector<GatedCall> calls_;
    std::vector<Run> runs_;
    int64_t panel_bytes_ = 0, most_tokens_ = 0;
};

}  // namespace mlxr
