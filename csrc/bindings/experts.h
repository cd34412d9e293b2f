// The Python objects of a mixture of experts, which several bindings take.
#pragma once

#include <string>

#include "bindings/checks.h"
#include "moe/experts.h"

namespace mlxr {

// A mixture; nanobind keeps the weights alive.
struct PythonExperts {
    Experts experts;
};

// How experts are chosen: a call but for logits and results, and the arrays that it points into.
struct PythonRouter {
    RouteCall call{};
    OptionalVector choice_bias, expert_scales;
};

}  // namespace mlxr
