// The kernels of one weight type as a row of a tier's table. They take the compiler minutes, so the types are shared
// out among three files, which cores compile side by side: kernels.cpp, kernels_spans.cpp and kernels_grids.cpp.
#pragma once

#include <type_traits>

#include "linear/decode.h"
#include "linear/double_rows.h"
#include "linear/panel.h"
#include "linear/rows.h"
#include "linear/strips.h"
#include "runtime/kernel_table.h"

#define MLXR_JOIN_NAMES(a, b) a##b
#define MLXR_JOIN(a, b) MLXR_JOIN_NAMES(a, b)
#define MLXR_ADD_SPAN_KERNELS MLXR_JOIN(mlxr_add_span_kernels_, MLXR_TIER)
#define MLXR_ADD_GRID_KERNELS MLXR_JOIN(mlxr_add_grid_kernels_, MLXR_TIER)

extern "C" {  // fill the rows of their share
void MLXR_ADD_SPAN_KERNELS(mlxr::KernelTable& table) noexcept;
void MLXR_ADD_GRID_KERNELS(mlxr::KernelTable& table) noexcept;
}

namespace {

// Where rows of more than one tile are slower than strips, or with minimums than rows of two blocks, see
// docs/cpu-kernels.md: with 16 registers, unpacking twice costs less than storing, but for types with scales of 16
// columns. Shorts have nothing to unpack.
template <Form F>
constexpr int strip_tokens() {
    if (is_short(F)) return mlxr::kManyTokens;
#if defined(MLXR_TIER_avx512)
    return kTokens + 1;
#else
    return is_fine(F) || F == Form::halved ? 2 * kTokens + 1 : mlxr::kManyTokens;
#endif
}

template <class W>
constexpr mlxr::RowsKernel find_strips() {
    if constexpr (strip_tokens<W::kForm>() == mlxr::kManyTokens) {
        return {mlxr::KernelName::rows, nullptr};
    } else if constexpr (W::kForm == Form::shifted || W::kForm == Form::span_shifted) {
        return {mlxr::KernelName::double_rows, multiply_double_rows<W>};
    } else {
        return {mlxr::KernelName::strips, multiply_strips<W>};
    }
}

template <class W>
constexpr mlxr::QuantKernels make_kernels() {
    return {
        .unit_columns = 32 * W::kGroups,
        .unit_bytes = W::kUnitBytes,
        .panel_tokens = mlxr::kTileTokens,
        .panel_group_bytes = PanelGroup<W::kForm>::kMeanBytes,
        .zero_point = W::kZeroPoint,
        .spans = has_spans(W::kForm),
        .shorts = is_short(W::kForm),
        .min_columns = min_pairs(W::kForm) == 0 ? 0 : 128 / min_pairs(W::kForm),
        .strip_tokens = strip_tokens<W::kForm>(),
        .rows = {mlxr::KernelName::rows, multiply_rows<W>},
        .strips = find_strips<W>(),
        .unpack = unpack_panel<W>,
        .panel = multiply_panel<W::kForm, W::kWide, W::kZeroPoint>,
        .decode = find_decoder<W>(),
    };
}

// What has no groups of 32 columns.
struct Floating {};
using f32 = Floating;
using bf16 = Floating;

// Types without spans, with spans, and those of the latter with grids, which few others share kernels with.
enum class Share { groups, spans, grids };
template <class W>
constexpr Share share_of() {
    if (has_grid<W>) return Share::grids;
    return has_spans(W::kForm) ? Share::spans : Share::groups;
}

// Sets the rows of the types of one share.
template <Share S>
void add_kernels(mlxr::KernelTable& table) {
    const auto add = [&]<class W>(Type type) {
        if constexpr (!std::is_same_v<W, Floating>) {
            if constexpr (share_of<W>() == S) table.quant[static_cast<int>(type)] = make_kernels<W>();
        }
    };
#define TYPE(name, ...) add.template operator()<name>(Type::name);
#include "tables/types.def"
}

}  // namespace
