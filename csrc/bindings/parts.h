// The weights of products of parts of rows (PartsProduct), and rotations of rows, which several bindings take.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "bindings/checks.h"
#include "bindings/weight.h"
#include "layers/hadamard.h"

namespace mlxr {

// A rotation of rows of so many columns, complete but for the rows.
inline HadamardCall check_hadamard(int64_t columns, const OptionalVector& signs, const std::optional<Ints>& order,
                                   int64_t block, bool inverse) {
    if (block < 1 || (block & (block - 1)) != 0 || columns % block != 0) {
        refuse("hadamard: block", std::to_string(block),
               "a power of two that divides the " + std::to_string(columns) + " columns");
    }
    if (signs) check_size("hadamard: length of signs", size_of(*signs, 0), columns);
    if (order) {
        if (inverse) refuse("hadamard: order", "given", "None, as it is the inverse");
        check_size("hadamard: length of order", size_of(*order, 0), columns);
        check_indices("hadamard: order", order->data(), columns, columns);
    }
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
    const float* const own_signs = signs ? signs->data() : nullptr;
    return {nullptr, nullptr, columns, block, own_signs, order ? order->data() : nullptr, inverse, scale};
}

// The weights of parts of rows of `columns` numbers, of which `passed` of each part pass.
inline std::vector<const LinearWeight*> check_parts(const nb::tuple& weights, int64_t passed, int64_t columns) {
    std::vector<const LinearWeight*> parts;
    for (const nb::handle item : weights) {
        PythonWeight& part = nb::cast<PythonWeight&>(item);
        part.used = true;
        parts.push_back(&part.weight);
        check_size("parts: in_features", part.weight.in_features(), parts[0]->in_features());
        check_size("parts: out_features", part.weight.out_features(), parts[0]->out_features());
    }
    if (parts.empty() || passed < 0) refuse("parts", "without weights, or less than none passes", "weights");
    check_size("parts: columns of x", columns, static_cast<int64_t>(parts.size()) * (parts[0]->in_features() + passed));
    return parts;
}

}  // namespace mlxr
