// See kernel_table.h.
#include "runtime/kernel_table.h"

namespace mlxr {

const KernelTable* kernel_table(Isa isa) {
    switch (isa) {
#define TIER(name)  \
    case Isa::name: \
        return mlxr_kernels_##name();
#define LEFT_OUT(name)
#include "tiers.def"
        default:
            return nullptr;
    }
}

}  // namespace mlxr
