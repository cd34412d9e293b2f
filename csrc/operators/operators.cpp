// The operators of one tier: compiled once per instruction set (MLXR_TIER), see operator_table.h. Knows
// neither Python nor threads; everything has internal linkage but the one function that hands out the table.
#include "operators/operator_table.h"
#if defined(MLXR_TIER_avx512bf16)
#include "probe/probe_table.h"
#include "runtime/kernel_table.h"
#endif

#include "operators/operators_lanes.inc"
// The bodies, written once against the lanes.
#include "attend/attend.inc"
#include "operators/activate.inc"
#include "operators/dense_pairs.inc"
#include "operators/lora.inc"
#include "operators/norms.inc"
#include "operators/rope.inc"
#include "operators/route.inc"
#include "operators/scale.inc"
#include "operators/streams.inc"
#include "operators/write_pages.inc"
#include "sample/sample.inc"

// After the operators whose steps they take.
#include "mixers/mixers.inc"

#define MLXR_JOIN_(a, b) a##b
#define MLXR_JOIN(a, b) MLXR_JOIN_(a, b)

namespace {

constexpr mlxr::OperatorTable kTable{
    kKeptWords,
    rms_norm,
    layer_norm,
    rope,
    activate,
    scale,
    add,
    gate_heads,
    mix_streams,
    spread_streams,
    match_streams,
    balance_streams,
    blend_streams,
    level_streams,
    cut_gates,
    lora_reduce,
    lora_expand,
    route,
    mix_rows,
    write_pages,
    narrow_rows,
    multiply_dense_pairs,
    short_conv,
    short_conv_states,
    prepare_recurrence,
    norm_keys,
    recur,
    scan,
    gated_norm,
    attend_scratch_bytes,
    attend,
    attend_merge,
    mask_logits,
    scan_logits,
    sum_exponentials,
    sum_few_exponentials,
    collect_logits,
};

}  // namespace

extern "C" const mlxr::OperatorTable* MLXR_JOIN(mlxr_operators_, MLXR_TIER)() noexcept {
    return &kTable;
}

#if defined(MLXR_TIER_avx512bf16)  // this source is all that it has of its own

extern "C" const mlxr::KernelTable* mlxr_kernels_avx512bf16() noexcept {
    static const mlxr::KernelTable kKernels = [] {
        mlxr::KernelTable table = *mlxr_kernels_avx512();
        table.name = "avx512bf16";
        return table;
    }();
    return &kKernels;
}

extern "C" const mlxr::ProbeTable* mlxr_probe_avx512bf16() noexcept {
    return mlxr_probe_avx512();
}

#endif
