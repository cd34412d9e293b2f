// Operators, and the kernels that compute them, as the ledger names them. Included by every tier: no functions.
#pragma once

namespace mlxr {

enum class OperatorName : int {
    activate,
    add,
    attend,
    embed,
    gate_heads,
    gated_delta,
    gated_norm,
    layer_norm,
    linear,
    lora,
    mamba2,
    moe,
    rms_norm,
    rope,
    sample,
    scale,
    short_conv,
    write_pages,
    count
};

// `fused`: made on the way into a product, whose time it is part of. `split`: positions of a long context in shares
// that are merged.
enum class KernelName : int {
    plain,
    fused,
    rows,
    strips,
    double_rows,
    panels,
    gated_panels,
    dense,
    pairs,
    tiles,
    split_tiles,
    packed,
    split_packed,
    route,
    count
};

}  // namespace mlxr
