// See kernel_table.h.
#include "runtime/kernel_table.h"

namespace mlxr {

const KernelTable* kernel_table(Isa isa) {
    switch (isa) {
#if defined(MLXR_AMX)
        case Isa::amx: {
            static const KernelTable kTable = [] {
                KernelTable table = *mlxr_kernels_avx512();
                mlxr_add_amx_kernels(table);
                return table;
            }();
            return &kTable;
        }
#endif
#if defined(MLXR_X86)
        case Isa::avx512:
            return mlxr_kernels_avx512();
        case Isa::avx2:
            return mlxr_kernels_avx2();
#elif defined(MLXR_ARM)
        case Isa::neon:
            return mlxr_kernels_neon();
#endif
        default:
            return mlxr_kernels_portable();
    }
}

}  // namespace mlxr
