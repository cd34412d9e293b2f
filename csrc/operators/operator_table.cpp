// See operator_table.h.
#include "operators/operator_table.h"

namespace mlxr {

const OperatorTable* operator_table(Isa isa) {
    switch (isa) {
#define TIER(name)  \
    case Isa::name: \
        return mlxr_operators_##name();
#define LEFT_OUT(name)
#include "tiers.def"
        default:
            return nullptr;
    }
}

}  // namespace mlxr
