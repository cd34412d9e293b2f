// Operators, and the kernels that compute them, as the ledger names them. Included by every tier: no functions.
#pragma once

namespace mlxr {

enum class OperatorName : int {
#define OPERATOR(name) name,
#include "tables/operators.def"
    count
};

enum class KernelName : int {
#define KERNEL(name, ledger) name,
#include "tables/kernels.def"
    count
};

}  // namespace mlxr
