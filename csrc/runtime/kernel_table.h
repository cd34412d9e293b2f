// What each tier's linear kernels offer and how drivers call them: plain data and functions, no Python, no
// threads.
//
// Weights lie in blocks of 16 output rows, repacked so that a vector register holds one 32-bit word of each
// row (see linear/layout.h). Activations of quantised products are int8 with one f32 scale for as many columns as a
// block of the weights has: a group of 32, or a span of 256; where the weights are 16-bit integers (f16), they are
// 13-bit integers. Each output element is one f32 sum over the groups, or over spans that are sums over groups (of
// floats or of integers, see forms.h), in ascending order, each step in floats a fused multiply-add, whichever kernel,
// tier, tile or thread computes it: equal bits everywhere.
#pragma once

#include <cstdint>

#include "quants/quants.h"
#include "runtime/cpu_features.h"
#include "runtime/kernel_names.h"

namespace mlxr {

inline constexpr int kGroupColumns = 32;
inline constexpr int kSpanGroups = 8;
inline constexpr int kPanelRows = 32;  // rows that a panel holds, two blocks
inline constexpr int kDenseRows = 32;  // rows of a block of f32 or bf16

// Zero points z of weight types that store q+z unsigned, and whether their sums go by 16 columns or by 32.
struct ZeroPoint {
    int value;
    bool halves;
};
constexpr ZeroPoint kZeroPoints[] = {{8, false}, {12, false}, {16, false}, {128, false}, {4, true},
                                     {32, true}, {128, true}, {1, false},  {12, true}};
inline constexpr int kZeroPointCount = 9;
inline constexpr int kSecondHalf = 0x8000;  // see start_second_half

// Quantised activations of a call, with one scale for each group, or for each span (quantize.h has the rules). Tokens
// lie in tiles of `tile` tokens; in a tile group after group, and in a group token after token, so that a kernel reads
// one stream. Item item_index(token, group) of each array belongs to that pair; of the arrays of spans,
// span_index(token, span). What no weight of the call needs is null.
struct Activations {
    int64_t groups;  // columns / 32; of shorts whole units, so that the last may have no columns; 0: not needed
    int64_t tile;
    int8_t* values;                   // 32 an item, -127..127
    int32_t* zeros[kZeroPointCount];  // -z * sum, 1 an item, or 2 by halves, the second with kSecondHalf added
    float* scales;                    // activation = scale * value; of groups, or of spans
    float* scaled_sums;               // of groups: scale * (sum of the 32 values)
    int16_t *sums, *half_sums;        // of spans: sums of 32 values, 8 a span, and of 16, 16 a span, see span_order
    int16_t* shorts;                  // 32 an item, -4095..4095
    float* short_scales;              // activation = 2**24 * short_scale * short
};

// Internal linkage: compiled per tier, they must not be shared between objects.
static inline int64_t item_index(const Activations& a, int64_t token, int64_t group) {
    return (token / a.tile * a.groups + group) * a.tile + token % a.tile;
}
static inline int64_t span_index(const Activations& a, int64_t token, int64_t span) {
    return (token / a.tile * (a.groups / kSpanGroups) + span) * a.tile + token % a.tile;
}
// Where sum `index` of a span lies: of four, 0 and 2 make a pair and 1 and 3, as bytes of a word do when they are
// masked.
static constexpr int span_order(int index) {
    return index / 4 * 4 + index % 2 * 2 + index / 2 % 2;
}

// Tiles hold a multiple of any panel kernel's register tile; fewer than kManyTokens tokens lie in one tile.
inline constexpr int64_t kTileTokens = 12;
inline constexpr int64_t kManyTokens = 64;

// Tokens [first_token, last_token) of columns [32*first_group, 32*last_group), whole spans if they are quantised by
// spans, to int8 or shorts. `x` is the first of them, in rows of `x_stride` floats, of which `columns` count: the rest
// of the shorts becomes zero. `zeros` and sums that are null are left out.
struct QuantizeJob {
    const float* x;
    int64_t x_stride, columns;
    int64_t first_token, last_token, first_group, last_group;
    const Activations* activations;
};

// Some tokens times some rows of one weight.
struct RowsJob {
    const uint8_t* weights;  // first block of the weight
    int64_t units;           // units in one block: columns / columns of a unit
    int64_t first_block, last_block;
    int64_t rows;                    // of the weight; lanes past it are not stored
    const Activations* activations;  // all tokens in one tile
    int64_t tokens;
    float* out;  // column 0 of this weight, token 0
    int64_t out_stride;
    const float* bias;  // [rows] or null
};

// Unpacks units [first_unit, last_unit) of blocks `block` and block+1 into a panel.
struct UnpackJob {
    const uint8_t* weights;
    int64_t units, blocks;  // of the weight; a block past the end unpacks as zeros
    int64_t block, first_unit, last_unit;
    uint8_t* panel;  // 64-byte aligned, panel_group_bytes for each group
};

// Tokens [first_token, last_token), first_token at the start of a tile or all in one, times one panel, which holds
// groups [first_group, last_group) of 32 rows. Sums begin at 0 with group 0 and continue from `out` otherwise; the bias
// is added at the end.
struct PanelJob {
    const uint8_t* panel;
    int64_t first_group, last_group;
    const Activations* activations;
    int64_t first_token, last_token;
    float* out;  // the panel's first column, token first_token
    int64_t out_stride;
    int64_t rows;       // stored rows, 1..32
    const float* bias;  // [rows] or null
};

// Some tokens times some blocks of 32 rows of f32.
struct DenseJob {
    const uint8_t* weights;
    int64_t columns;
    int64_t first_block, last_block;
    int64_t rows;
    const float* x;  // [tokens][columns]
    int64_t tokens;
    float* out;
    int64_t out_stride;
    const float* bias;
};

// A kernel for fewer than kManyTokens tokens, and its name: what runs is what is counted.
struct RowsKernel {
    KernelName name;
    void (*run)(const RowsJob& job);
};

// The kernels of one quantised type, or of f16.
struct QuantKernels {
    int unit_columns, unit_bytes;  // of 16 rows
    int64_t panel_tokens;          // that `panel` takes at a time, whole tiles
    int panel_group_bytes;         // with its share of what belongs to a span
    int zero_point;                // index into kZeroPoints, or -1
    bool spans;                    // activations with a scale for a span, not for a group
    bool shorts;                   // activations of 16 bits
    int min_columns;               // of spans, columns that a minimum is for; 0 without minimums
    int strip_tokens;              // from so many tokens on strips are faster than rows
    RowsKernel rows;               // 1 to kManyTokens - 1 tokens
    RowsKernel strips;             // strip_tokens to kManyTokens - 1
    void (*unpack)(const UnpackJob& job);
    void (*panel)(const PanelJob& job);
    void (*decode)(const uint8_t* source, int64_t blocks, float* out);  // raw blocks to f32; null for f16
};

struct KernelTable {
    const char* name;
    QuantKernels quant[kTypeCount];      // empty for f32 and bf16
    void (*dense)(const DenseJob& job);  // f32; bf16 is in operator_table.h
    void (*quantize_groups)(const QuantizeJob& job);
    void (*quantize_spans)(const QuantizeJob& job);
    void (*quantize_shorts)(const QuantizeJob& job);
    void (*end_panels)();  // gives back what panel kernels hold of the processor: after a thread's task; or null
};

// The table of an available tier.
const KernelTable* kernel_table(Isa isa);

}  // namespace mlxr

extern "C" {  // as far as the tiers are compiled
const mlxr::KernelTable* mlxr_kernels_portable() noexcept;
const mlxr::KernelTable* mlxr_kernels_avx2() noexcept;
const mlxr::KernelTable* mlxr_kernels_avx512() noexcept;
const mlxr::KernelTable* mlxr_kernels_avx512bf16() noexcept;
const mlxr::KernelTable* mlxr_kernels_neon() noexcept;
const mlxr::KernelTable* mlxr_kernels_amx() noexcept;
}
