// From rows of raw blocks, as in a file, to the kernels' layout (layout.h).
#pragma once

#include <cstdint>

#include "quants/quants.h"

namespace mlxr {

inline constexpr int64_t kRepackRows = 16;

// True for the two types without blocks and groups: f32 and bf16.
static constexpr bool is_dense(Type type) {
    return type == Type::f32 || type == Type::bf16;
}

// Rows of one block in the kernels' layout: 16, or 32 for the dense types.
int64_t block_rows(Type type);

// Bytes of one block with `columns` columns.
int64_t block_bytes(Type type, int64_t columns);

// Writes block `block` of a weight with `rows` rows, which lie one after another at `source`. `out` is the
// block's place and holds zeros, which stay in rows past the end.
void repack_block(Type type, const uint8_t* source, int64_t rows, int64_t columns, int64_t block, uint8_t* out);

// Writes the unit of `rows` rows, at most 16, of one block each, which follow one another at `source`; returns what is
// behind them. Not for f16, f32 and bf16.
const uint8_t* repack_blocks(Type type, const uint8_t* source, int rows, uint8_t* out);

}  // namespace mlxr
