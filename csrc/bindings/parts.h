// The weights of products of parts of rows (PartsProduct), which several bindings take.
#pragma once

#include <string>
#include <vector>

#include "bindings/checks.h"
#include "bindings/weight.h"

namespace mlxr {

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
