// The checks of an embedding, which two bindings make.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "embed/ngrams.h"
#include "quants/quants.h"
#include "runtime/runtime.h"

namespace mlxr {

using TokenIds = nanobind::ndarray<const int32_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using RawBlocks = nanobind::ndarray<const uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

inline Type find_type(const std::string& name) {
    Type type;
    if (!parse_type(name, type)) throw nanobind::value_error(("no kernel for tensor type '" + name + "'").c_str());
    return type;
}

// Rows of a table of raw blocks with rows of `columns` numbers, which these fill.
inline size_t count_rows(Type type, const RawBlocks& data, size_t columns) {
    const TypeInfo& info = type_info(type);
    return data.size() / (columns / static_cast<size_t>(info.block_elements) * static_cast<size_t>(info.block_bytes));
}

// The type of a table of whole rows of `columns` numbers. Else ValueError.
inline Type check_table(const std::string& type_name, const RawBlocks& data, size_t columns) {
    const auto refuse = [](const std::string& text) { throw nanobind::value_error(text.c_str()); };
    const Type type = find_type(type_name);
    const TypeInfo& info = type_info(type);
    const size_t elements = static_cast<size_t>(info.block_elements);
    if (columns == 0 || columns % elements != 0) {
        refuse("embed: columns of out is " + std::to_string(columns) + ", which " + info.name +
               " needs to be a multiple of " + std::to_string(elements));
    }
    const size_t row_bytes = columns / elements * static_cast<size_t>(info.block_bytes);
    const size_t rows = count_rows(type, data, columns);
    if (data.size() != rows * row_bytes) {
        refuse("embed: bytes of data is " + std::to_string(data.size()) + ", expected " +
               std::to_string(rows * row_bytes));
    }
    return type;
}

// How the rows of a table with so many are named by n-grams, complete but for the arrays of a batch. Else ValueError.
inline NgramCall check_ngrams(int64_t end, const std::vector<uint64_t>& multipliers, const std::vector<uint64_t>& sizes,
                              const std::vector<uint64_t>& offsets, size_t rows) {
    const auto refuse = [](const char* text) { throw nanobind::value_error(text); };
    if (multipliers.size() < 2 || sizes.empty() || sizes.size() % (multipliers.size() - 1) != 0 ||
        offsets.size() != sizes.size()) {
        refuse("ngrams: sizes, expected as many for each number of tokens, and an offset for each");
    }
    if (end < 0 || end >= int64_t{1} << 24) refuse("ngrams: end, expected an id below 2**24");
    const uint64_t most = std::min<uint64_t>(rows, INT32_MAX);
    for (size_t i = 0; i < sizes.size(); ++i) {
        if (sizes[i] < 1 || sizes[i] > most || offsets[i] > most - sizes[i]) {
            refuse("ngrams: sizes and offsets, expected rows of the table");
        }
    }
    return {nullptr, static_cast<int32_t>(end), multipliers, sizes, offsets, {}, nullptr};
}

// The same, all ids being among its rows.
inline Type check_embed(const TokenIds& ids, const std::string& type_name, const RawBlocks& data, size_t columns) {
    const Type type = check_table(type_name, data, columns);
    const size_t rows = count_rows(type, data, columns);
    for (size_t i = 0; i < ids.size(); ++i) {
        const int32_t id = ids.data()[i];
        if (id >= 0 && static_cast<size_t>(id) < rows) continue;
        const std::string has = std::to_string(id), wants = std::to_string(rows);
        throw nanobind::value_error(("embed: token id " + has + " is outside the table's " + wants + " rows").c_str());
    }
    return type;
}

}  // namespace mlxr
