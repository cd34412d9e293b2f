// The table of the linear kernels of one tier, and those for types without spans. Compiled once per tier, with
// MLXR_TIER its name.
#include "linear/kernels.h"

#include "linear/dense.h"
#include "linear/quantize.h"

#define MLXR_QUOTE_NAME(a) #a
#define MLXR_QUOTE(a) MLXR_QUOTE_NAME(a)

namespace {

mlxr::KernelTable make_table() noexcept {
    mlxr::KernelTable table{};
    table.name = MLXR_QUOTE(MLXR_TIER);
    add_kernels<Share::groups>(table);
    MLXR_ADD_SPAN_KERNELS(table);
    MLXR_ADD_GRID_KERNELS(table);
    table.dense = multiply_dense;
    table.quantize_groups = quantize_groups;
    table.quantize_spans = quantize_spans;
    table.quantize_shorts = quantize_shorts;
    return table;
}

}  // namespace

extern "C" const mlxr::KernelTable* MLXR_JOIN(mlxr_kernels_, MLXR_TIER)() noexcept {
    static const mlxr::KernelTable kTable = make_table();
    return &kTable;
}
