// The linear kernels of one tier for the types with spans but no grids. Compiled once per tier, with MLXR_TIER its
// name.
#include "linear/kernels.h"

extern "C" void MLXR_ADD_SPAN_KERNELS(mlxr::KernelTable& table) noexcept {
    add_kernels<Share::spans>(table);
}
