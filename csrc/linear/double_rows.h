// Some tokens and types with minimums: two blocks of rows at once. A tile of tokens broadcasts each of its activations
// once for both, so that it is bound by the multiplying ports and not, as rows.h with eight tokens, by the loads as
// well; unpacking, which goes beside the products, is done by every tile anew. For 32 registers only. Sums as in
// rows.h, bit for bit.
#pragma once

#include "linear/panel.h"

namespace {

using mlxr::RowsJob;

constexpr int kDoubleTokens = 5;   // in a tile, at most
constexpr int kStretchGroups = 8;  // groups that all tiles pass before the next
constexpr int kAheadGroups = 16;   // between what is multiplied and what memory is asked for
constexpr int kBothBlocks = 2;
constexpr int kMostDoubleTokens = mlxr::kManyTokens - 1;

// Some units of two blocks, at most kStretchGroups groups, and the scales of their groups, or of the span that they
// are.
struct Stretch {
    const uint8_t* blocks[kBothBlocks];
    int64_t units;
    Floats step[kStretchGroups][kBothBlocks], shift[kStretchGroups][kBothBlocks];
    Ints mins[kBothBlocks][4];
    Floats least[kBothBlocks];
};
static_assert(kStretchGroups == mlxr::kSpanGroups);

template <class W>
MLXR_INLINE void read_scales(Stretch& stretch) {
    for (int64_t unit = 0; unit < stretch.units; ++unit) {
        repeat<kBothBlocks>([&](int b) MLXR_BODY {
            Scales s;
            W::scales(Unit{stretch.blocks[b] + unit * W::kUnitBytes, 0}, s);
            for (int g = 0; g < W::kGroups; ++g) {
                stretch.step[unit * W::kGroups + g][b] = s.step[g];
                if (!has_spans(W::kForm)) stretch.shift[unit * W::kGroups + g][b] = s.shift[g];
            }
            if constexpr (has_spans(W::kForm)) {
                repeat<4>([&](int i) MLXR_BODY { stretch.mins[b][i] = s.mins[i]; });
                stretch.least[b] = s.least;
            }
        });
    }
}

// total += group n*kStride+J of the units, group `g` of the stretch, times the same of the M tokens from `item` on.
template <class W, int M, int J>
MLXR_INLINE void add_double_group(const Unit* units, int n, const Stretch& stretch, int64_t g, const Activations& a,
                                  int64_t item, Floats (*total)[kBothBlocks]) {
    const int8_t* const values = a.values + 32 * item;
    Ints sums[M][kBothBlocks];
    repeat<M>([&](int m) MLXR_BODY {
        repeat<kBothBlocks>([&](int b) MLXR_BODY { sums[m][b] = start_group<W::kWide, W::kZeroPoint>(a, item + m); });
    });
    repeat<4>([&](int pair) MLXR_BODY {
        const int i = 2 * pair;
        Ints w[kBothBlocks][8];  // of which two are used, and so unpacked
        repeat<kBothBlocks>([&](int b) MLXR_BODY { W::template weights<J>(units[b], n, w[b]); });
        repeat<M>([&](int m) MLXR_BODY {
            const Ints a0 = spread(values + 32 * m + 4 * i), a1 = spread(values + 32 * m + 4 * i + 4);
            repeat<kBothBlocks>(
                [&](int b) MLXR_BODY { sums[m][b] = dot_pair<W::kWide>(sums[m][b], w[b][i], w[b][i + 1], a0, a1); });
        });
    });
    repeat<M>([&](int m) MLXR_BODY {
        repeat<kBothBlocks>([&](int b) MLXR_BODY {
            const Floats step = stretch.step[g][b], sum = to_floats(sums[m][b]);
            if constexpr (has_spans(W::kForm)) {
                total[m][b] = fma(step, sum, total[m][b]);
            } else {
                total[m][b] = fma(mul(step, splat(a.scales[item + m])), sum, total[m][b]);
                total[m][b] = fma_negated(stretch.shift[g][b], splat(a.scaled_sums[item + m]), total[m][b]);
            }
        });
    });
}

template <class W, int M, int J>
MLXR_INLINE void add_double_stride(const Unit* units, int n, const Stretch& stretch, int64_t first_group,
                                   const Activations& a, int64_t item, Floats (*total)[kBothBlocks]) {
    if constexpr (J < W::kStride) {
        const int g = n * W::kStride + J;
        add_double_group<W, M, J>(units, n, stretch, first_group + g, a, item + g * a.tile, total);
        add_double_stride<W, M, J + 1>(units, n, stretch, first_group, a, item, total);
    }
}

// What memory is asked for, `bytes` of each block with each stride.
struct DoubleAhead {
    const uint8_t* next[kBothBlocks];
    int64_t bytes;
};
MLXR_INLINE void fetch_both(DoubleAhead& ahead) {
    for (int64_t i = 0; i < ahead.bytes; i += 64) {
        for (const uint8_t* next : ahead.next) __builtin_prefetch(next + i);
    }
    for (const uint8_t*& next : ahead.next) next += ahead.bytes;
}

// sums += the stretch, from group `first_group` of the columns on, times the M tokens from `token` on.
template <class W, int M>
MLXR_INLINE void add_stretch(const Stretch& stretch, const Activations& a, int64_t first_group, int64_t token,
                             float* sums, DoubleAhead& ahead) {
    Floats total[M][kBothBlocks];
    const int64_t span = first_group / mlxr::kSpanGroups * a.tile + token;
    // Calls visit(sum, m, b, where it lies in memory).
    const auto visit_sums = [&](const auto& visit) MLXR_BODY {
        repeat<M>([&](int m) MLXR_BODY {
            repeat<kBothBlocks>([&](int b)
                                    MLXR_BODY { visit(total[m][b], m, b, sums + kPanelRows * m + kBlockRows * b); });
        });
    };
    visit_sums([&](Floats& sum, auto m, auto b, const float* at) MLXR_BODY {
        if constexpr (has_spans(W::kForm)) {
            sum =
                sum_mins<W::kForm>(a, span + m, stretch.least[b], [&](int i) MLXR_BODY { return stretch.mins[b][i]; });
        } else {
            sum = load_floats(at);
        }
    });
    for (int64_t unit = 0; unit < stretch.units; ++unit) {
        const int64_t offset = unit * W::kUnitBytes, group = unit * W::kGroups;
        const Unit units[kBothBlocks] = {{stretch.blocks[0] + offset, 0}, {stretch.blocks[1] + offset, 0}};
        for (int n = 0; n < W::kGroups / W::kStride; ++n) {
            fetch_both(ahead);
            add_double_stride<W, M, 0>(units, n, stretch, group, a, (first_group + group) * a.tile + token, total);
        }
    }
    visit_sums([&](Floats& sum, auto m, auto, float* at) MLXR_BODY {
        if constexpr (has_spans(W::kForm)) sum = fma(splat(a.scales[span + m]), sum, load_floats(at));
        store_floats(at, sum);
    });
}

// Two blocks' rows, whose sums are known, into the result.
MLXR_INLINE void store_double(const RowsJob& job, int64_t block, const float* sums) {
    for (int64_t token = 0; token < job.tokens; ++token) {
        for (int b = 0; b < kBothBlocks; ++b) {
            const int64_t row = (block + b) * kBlockRows;
            const int valid = static_cast<int>(job.rows - row);
            Floats sum = load_floats(sums + kPanelRows * token + kBlockRows * b);
            if (job.bias != nullptr) sum = add(sum, load_some(job.bias + row, valid));
            store_some(job.out + token * job.out_stride + row, sum, valid);
        }
    }
}

// Tiles of M and of M - 1 tokens. Of an odd number of blocks the last is multiplied twice.
template <class W, int M>
void multiply_double_tiles(const RowsJob& job, int64_t tiles) {
    static_assert(kParts == 1 && (W::kForm == Form::shifted || W::kForm == Form::span_shifted));
    constexpr int64_t kUnits = kStretchGroups / W::kGroups, kAheadUnits = kAheadGroups / W::kGroups;
    constexpr int64_t kStrides = W::kGroups / W::kStride;
    alignas(64) float sums[kMostDoubleTokens * kPanelRows];
    const Activations a = *job.activations;
    const int64_t block_bytes = job.units * W::kUnitBytes;
    for (int64_t block = job.first_block; block < job.last_block; block += kBothBlocks) {
        const uint8_t* const first = job.weights + block * block_bytes;
        const int64_t second = block + 1 < job.last_block ? block_bytes : 0;
        memset(sums, 0, static_cast<size_t>(job.tokens) * kPanelRows * sizeof(float));
        for (int64_t unit = 0; unit < job.units; unit += kUnits) {
            Stretch stretch;
            stretch.blocks[0] = first + unit * W::kUnitBytes;
            stretch.blocks[1] = stretch.blocks[0] + second;
            stretch.units = job.units - unit < kUnits ? job.units - unit : kUnits;
            read_scales<W>(stretch);
            const int64_t later = unit + kAheadUnits;  // behind these blocks come the next two
            const uint8_t* const next = first + (later < job.units ? later : later + job.units) * W::kUnitBytes;
            DoubleAhead ahead{{next, next + block_bytes}, W::kUnitBytes / kStrides / tiles};
            for (int64_t tile = 0; tile < tiles; ++tile) {
                const int64_t token = job.tokens * tile / tiles, last = job.tokens * (tile + 1) / tiles;
                float* const at = sums + kPanelRows * token;
                if (last - token == M) {
                    add_stretch<W, M>(stretch, a, unit * W::kGroups, token, at, ahead);
                } else {
                    add_stretch<W, M - 1>(stretch, a, unit * W::kGroups, token, at, ahead);
                }
            }
        }
        store_double(job, block, sums);
    }
}

// More tokens than a tile of rows.h has.
template <class W>
void multiply_double_rows(const RowsJob& job) {
    const int64_t tiles = (job.tokens + kDoubleTokens - 1) / kDoubleTokens;
    if ((job.tokens + tiles - 1) / tiles == kDoubleTokens) return multiply_double_tiles<W, kDoubleTokens>(job, tiles);
    multiply_double_tiles<W, kDoubleTokens - 1>(job, tiles);
}

}  // namespace
