// See operator_table.h.
#include "operators/operator_table.h"

namespace mlxr {

const OperatorTable* operator_table(Isa isa) {
    switch (isa) {
#if defined(MLXR_X86)
        case Isa::amx:
        case Isa::avx512:
            return mlxr_operators_avx512();
        case Isa::avx2:
            return mlxr_operators_avx2();
#elif defined(MLXR_ARM)
        case Isa::neon:
            return mlxr_operators_neon();
#endif
        default:
            return mlxr_operators_portable();
    }
}

}  // namespace mlxr
