// Where a number lies in a page of bf16 or int8 keys or values, and where pages may be read as they are.
//
// A page holds page_size * head_dim numbers of a KV head, in pairs as the dot products of pairs want them:
//   keys    groups of 16 positions (the last may have fewer): (head_dim / 2, positions of the group, 2)
//   values  pairs of positions: (page_size / 2, head_dim, 2)
// Of an odd number of dimensions or positions the last stands alone, without a place beside it: every page is
// exactly full, whatever its size.
//
// int8 numbers (q8) lie in the same order, one byte each, and after them an f32 scale for each position, by which its
// head_dim numbers are multiplied; they need not be aligned.
#pragma once

#include <stdint.h>

namespace {

constexpr int64_t kPackedGroup = 16;

inline __attribute__((always_inline)) int64_t locate_key(int64_t page_size, int64_t head_dim, int64_t position,
                                                         int64_t d) {
    const int64_t start = position / kPackedGroup * kPackedGroup;
    const int64_t left = page_size - start, count = left < kPackedGroup ? left : kPackedGroup;
    const int64_t pair = start * head_dim + d / 2 * 2 * count, within = position - start;
    return d + 1 == head_dim && head_dim % 2 != 0 ? pair + within : pair + 2 * within + d % 2;
}

inline __attribute__((always_inline)) int64_t locate_value(int64_t page_size, int64_t head_dim, int64_t position,
                                                           int64_t d) {
    const int64_t pair = position / 2 * 2 * head_dim;
    return position + 1 == page_size && page_size % 2 != 0 ? pair + d : pair + 2 * d + position % 2;
}

}  // namespace
