// The Python object of a group of weights, which several bindings take.
#pragma once

#include <cstdint>
#include <vector>

#include "bindings/embed.h"
#include "linear/linear.h"

namespace mlxr {

// A group of weights while it is built, then while it is used: the first use ends the building, so that no
// thread appends while another multiplies.
struct PythonWeight {
    explicit PythonWeight(int64_t in_features) : weight(in_features) {}
    mlxr::LinearWeight weight;
    std::vector<RawBlocks> left;  // the blocks of parts that stay in their file
    bool used = false;
};

}  // namespace mlxr
