// Rows of a table that tokens name by themselves and by those before them: each has some rows for every number of
// tokens from two on, by hashes. Knows no Python.
#pragma once

#include <cstdint>
#include <vector>

#include "mixers/mixers.h"

namespace mlxr {

// The row of a head is the exclusive or of ids times multipliers, of as many tokens as it has, modulo its size, behind
// its offset. A token that ends a text is the first of one for those after it, which see that id in place of it and of
// all before; so they do before the first token. Of each sequence the last ids, plus 1, are its state, the oldest
// first: zeros where there was no token yet.
struct NgramCall {
    const int32_t* ids;                    // (tokens)
    int32_t end;                           // the id of the token that ends a text
    std::vector<uint64_t> multipliers;     // of the token itself, of the one before it, ...
    std::vector<uint64_t> sizes, offsets;  // of heads: as many for each number of tokens
    States states;
    int32_t* rows;  // (tokens, heads)

    int64_t heads() const { return static_cast<int64_t>(sizes.size()); }
    int64_t state_floats() const { return static_cast<int64_t>(multipliers.size()) - 1; }
};

// Finds the rows and keeps the last ids. Sizes are above 0.
void find_ngrams(const NgramCall& call);

}  // namespace mlxr
