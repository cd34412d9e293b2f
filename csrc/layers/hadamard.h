// Rotations of rows whose weights stand rotated: signs, then the Walsh-Hadamard transform. Knows no Python.
#pragma once

#include <cstdint>

#include "linear/linear.h"
#include "runtime/runtime.h"

namespace mlxr {

// out = H (signs * x[order]) of each `block` neighbours, or inverse: signs * (H x), with the normalised Walsh-Hadamard
// matrix in Sylvester's order: entry (i, j) is 1 / sqrt(block), negative where i & j has an odd number of ones. Sums
// and differences are made of numbers that stand 1, 2, 4, ... apart, the result is multiplied by 1 / sqrt(block), and
// each step is rounded; so bits are the same on every processor.
struct HadamardCall {
    const float* x;  // (rows, columns)
    float* out;      // the same, and may be x where there is no order
    int64_t columns, block;
    const float* signs;    // (columns) of 1 and -1, or null
    const int32_t* order;  // (columns): which number of a row stands there; or null, as for the inverse
    bool inverse;
    float scale;  // 1 / sqrt(block)
};

// `call` must be checked; the caller holds runtime.mutex.
void spread_hadamard(Runtime& runtime, const HadamardCall& call, int64_t rows);

// The same on the way into a product, of rows that `make_x` makes, if it is there.
MakeRows fuse_hadamard(Runtime& runtime, const HadamardCall& call, MakeRows make_x);

}  // namespace mlxr
