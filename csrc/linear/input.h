// The input of products in the forms that their weights need: bytes with a scale for each group or for each span,
// shorts, pairs of bf16, or plain floats. Made of rows of floats, or gathered from tokens that have been converted.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/linear.h"
#include "linear/repack.h"

namespace mlxr {

// Which forms of an input weights need.
struct Needs {
    struct Bytes {
        bool any = false, sums = false, half_sums = false;
        bool zeros[kZeroPointCount] = {};
    };
    Bytes groups, spans;
    bool shorts = false, pairs = false, floats = false;

    void add(const Runtime& runtime, const LinearWeight& weight);
    bool converts() const { return groups.any || spans.any || shorts || pairs; }
};

// Tokens in tiles of `tile`; forms that no weight needs are empty. Where `x` is null, others make the rest.
struct LinearInput {
    const float* x;  // (tokens, columns)
    int64_t tokens, columns, tile;
    Activations groups{}, spans{}, shorts{};
    uint32_t* pairs = nullptr;
    int64_t pair_words = 0;  // of each pair, as the tier keeps them
    int64_t x_stride = 0;    // from one token to the next, 0 for columns

    int64_t stride() const { return x_stride != 0 ? x_stride : columns; }
};

inline int64_t align_line(int64_t bytes) {
    return (bytes + 63) / 64 * 64;
}

// Tokens in a tile of activations.
inline int64_t tile_of(int64_t tokens) {
    return tokens < kManyTokens ? tokens : kTileTokens;
}

// Units in a block of a quantised weight; the last of f16 may be filled up with zeros.
inline int64_t units_of(const Runtime& runtime, Type type, int64_t columns) {
    const int64_t unit_columns = runtime.kernels->quant[static_cast<int>(type)].unit_columns;
    return (columns + unit_columns - 1) / unit_columns;
}

// Lays the forms of an input out from `at` on, whose sizes and tile are known, or from null on; returns the end.
std::byte* lay_out(const Runtime& runtime, const Needs& needs, LinearInput& input, std::byte* at);

// Bytes of the forms of an input.
int64_t measure_input(const Runtime& runtime, const Needs& needs, LinearInput input);

// To the forms that `input` has room for, up to the last group that each has. The job's activations are left out.
void quantize(const Runtime& runtime, const LinearInput& input, const QuantizeJob& job);

// Tokens [first, last) of x to all forms that there is room for.
void convert_tokens(const Runtime& runtime, const LinearInput& input, int64_t first, int64_t last);

// Token `token` of `to` becomes the token of `from`, which is one alone in all forms that `to` has; and its floats,
// with `floats`, which then are those of `to`.
void copy_token(const LinearInput& from, const LinearInput& to, int64_t token, float* floats);

}  // namespace mlxr
