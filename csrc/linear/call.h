// One product while it runs, as its drivers share it: multiply.cpp (few tokens), panels.cpp (many), gated.cpp (gate, up
// and down in one).
#pragma once

#include <cstdint>
#include <limits>

#include "linear/linear.h"
#include "linear/repack.h"

namespace mlxr {

// Groups in a panel at most: 128 of up to 1.4 KB (f16 2.1) stay in a second-level cache beside the activations.
inline constexpr int64_t kPanelGroups = 128;

// The input of a call in the forms that its weights need: with a scale for each group, for each span, or as shorts.
struct QuantizedInput {
    Activations groups, spans, shorts;
};

struct LinearCall {
    Runtime& runtime;
    const LinearWeight& weight;
    const float* x;
    int64_t tokens;
    float* out;
    QuantizedInput input;
    uint32_t* pairs;  // the activations as pairs of bf16; null without parts of bf16
    int64_t pairs_tile;
};

inline int64_t align_line(int64_t bytes) {
    return (bytes + 63) / 64 * 64;
}

inline const QuantKernels& kernels_of(const LinearCall& call, Type type) {
    return call.runtime.kernels->quant[static_cast<int>(type)];
}

inline const Activations& activations_of(const LinearCall& call, Type type) {
    if (type == Type::f16) return call.input.shorts;
    return kernels_of(call, type).spans ? call.input.spans : call.input.groups;
}

// Whether strips multiply a part of fewer than kManyTokens tokens, two blocks at a time.
inline bool uses_strips(const LinearCall& call, const LinearWeight::Part& part) {
    return !is_dense(part.type) && call.runtime.takes_strips && call.tokens >= kernels_of(call, part.type).strip_tokens;
}

// What multiplies a quantised part of fewer than kManyTokens tokens.
inline const RowsKernel& rows_kernel(const LinearCall& call, const LinearWeight::Part& part) {
    const QuantKernels& kernels = kernels_of(call, part.type);
    return uses_strips(call, part) ? kernels.strips : kernels.rows;
}

// What multiplies a part: the drivers go by it, and the ledger counts it.
inline KernelName choose_kernel(const LinearCall& call, const LinearWeight::Part& part) {
    if (is_dense(part.type)) return part.type == Type::bf16 ? KernelName::pairs : KernelName::dense;
    return call.tokens < kManyTokens ? rows_kernel(call, part).name : KernelName::panels;
}

// What a whole call runs, for the ledger; `gated` where panels are activated at once.
Ran describe_call(const LinearCall& call, bool gated = false);
Tally::Work measure_call(const LinearCall& call);

inline const float* bias_of(const LinearWeight::Part& part) {
    return part.bias.empty() ? nullptr : part.bias.data();
}

// Units in a block of a part; the last of f16 may be filled up with zeros.
inline int64_t units_of(const LinearCall& call, Type type) {
    const int64_t unit_columns = kernels_of(call, type).unit_columns;
    return (call.weight.in_features() + unit_columns - 1) / unit_columns;
}

inline int64_t filled_columns(const LinearCall& call, Type type) {
    return units_of(call, type) * kernels_of(call, type).unit_columns;
}

// To the forms that `input` has room for, up to the last group that each has. The job's activations are left out.
inline constexpr int64_t kAllGroups = std::numeric_limits<int64_t>::max();
void quantize(const Runtime& runtime, const QuantizedInput& input, const QuantizeJob& job);

inline int64_t panels_of(const LinearWeight::Part& part) {
    return (part.rows + kPanelRows - 1) / kPanelRows;
}

// A call whose activations lie in scratch memory, undefined so far, in the forms that its parts need.
LinearCall begin_call(Runtime& runtime, const LinearWeight& weight, const float* x, int64_t tokens, float* out,
                      Scratch use);

// Tokens in a tile of activations.
inline int64_t tile_of(int64_t tokens) {
    return tokens < kManyTokens ? tokens : kTileTokens;
}

// Makes the input (if that is left to do) and quantises or narrows it, on all threads.
void prepare_together(const LinearCall& call, const MakeRows& make_rows);

// Blocks [first, last) of a part without panels: all tokens; or, of dense parts, tokens [first_token, last_token),
// first_token at the start of a tile.
void multiply_blocks(const LinearCall& call, const LinearWeight::Part& part, int64_t first, int64_t last);
void multiply_dense(const LinearCall& call, const LinearWeight::Part& part, int64_t first, int64_t last,
                    int64_t first_token, int64_t last_token);

// Many tokens, whose input is prepared.
void multiply_many(const LinearCall& call);

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

}  // namespace mlxr
