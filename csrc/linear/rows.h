// Few tokens: the stream of weights is unpacked in registers and multiplied with a tile of tokens at once, so
// that the weights are read once. One sum per lane and token, over ascending groups (kernel_table.h).
#pragma once

#include "linear/unpack.h"

namespace {

using mlxr::Activations;
using mlxr::RowsJob;

// sums[m] += N words of weights times the values of M items.
template <bool Wide, int M, int N>
MLXR_INLINE void add_words(const Ints* w, const int8_t* values, Ints* sums) {
    repeat<N / 2>([&](int pair) MLXR_BODY {
        const int i = 2 * pair;
        repeat<M>([&](int m)
                      MLXR_BODY { sums[m] = dot_pair_at<Wide>(sums[m], w[i], w[i + 1], values + 32 * m + 4 * i); });
    });
}

// sums[m] += a group of the row times the same of the M tokens whose items begin at `at`.
template <Form F, bool Wide, int Zero, int M>
MLXR_INLINE void add_group(const Ints* w, const Scales& s, int g, const Activations& a, int64_t at, Total<F>* sums) {
    const int8_t* values = a.values + 32 * at;
    Ints products[M];
    if constexpr (is_fine(F) || F == Form::halved) {
        Ints second[M];
        repeat<M>([&](int m) MLXR_BODY {
            products[m] = start_group<Wide, Zero>(a, 2 * (at + m));
            second[m] = start_second_half<F, Wide, Zero>(a, 2 * (at + m) + 1);
        });
        add_words<Wide, M, 4>(w, values, products);
        add_words<Wide, M, 4>(w + 4, values + 16, second);
        repeat<M>([&](int m) MLXR_BODY {
            if constexpr (F == Form::halved) {
                sums[m] = add_scaled(products[m], s.step[g], a.scales[at + m], sums[m]);
                sums[m] = add_scaled(second[m], s.second[g], a.scales[at + m], sums[m]);
            } else {
                sums[m] = add_halves<F>(sums[m], products[m], second[m], s.fine[g]);
            }
        });
    } else {
        repeat<M>([&](int m) MLXR_BODY { products[m] = start_group<Wide, Zero>(a, at + m); });
        add_words<Wide, M, 8>(w, values, products);
        repeat<M>([&](int m) MLXR_BODY {
            Floats step = s.step[g];
            if constexpr (!has_spans(F)) step = mul(step, splat(a.scales[at + m]));
            sums[m] = fma(step, to_floats(products[m]), sums[m]);
        });
    }
    repeat<M>([&](int m) MLXR_BODY {
        if constexpr (F == Form::shifted) {
            sums[m] = fma_negated(s.shift[g], splat(a.scaled_sums[at + m]), sums[m]);
        }
    });
}

// The same for 16-bit weights and activations.
template <class W, int M>
MLXR_INLINE void add_shorts(Unit unit, const Scales& s, int g, const Activations& a, int64_t at, Floats* sums) {
    const int16_t* values = a.shorts + 32 * at;
    Ints products[M];
    repeat<M>([&](int m) MLXR_BODY { products[m] = splat(0); });
    repeat<kShortWords / 2>([&](int pair) MLXR_BODY {
        Ints w[2];
        W::shorts(unit, g, pair, w);
        repeat<2>([&](int i) MLXR_BODY {
            repeat<M>([&](int m) MLXR_BODY {
                products[m] = dot_shorts_at(products[m], w[i], values + 32 * m + 2 * (2 * pair + i));
            });
        });
    });
    repeat<M>([&](int m) MLXR_BODY {
        if constexpr (W::kForm == Form::shorts) {
            sums[m] = add_short_sum(products[m], s.exponent, a.short_scales[at + m], sums[m]);
        } else {
            sums[m] = add_scaled(products[m], s.step[0], a.short_scales[at + m], sums[m]);
        }
    });
}

// Groups n*kStride+J.. of the unit, whose first items for the tokens begin at `at`.
template <class W, int M, int J>
MLXR_INLINE void add_stride(Unit unit, int n, const Scales& s, const Activations& a, int64_t at,
                            Total<W::kForm>* sums) {
    if constexpr (is_short(W::kForm)) {
        add_shorts<W, M>(unit, s, n, a, at + n * a.tile, sums);
    } else if constexpr (J < W::kStride) {
        const int g = n * W::kStride + J;
        Ints w[8];
        W::template weights<J>(unit, n, w);
        add_group<W::kForm, W::kWide, W::kZeroPoint, M>(w, s, g, a, at + g * a.tile, sums);
        add_stride<W, M, J + 1>(unit, n, s, a, at, sums);
    }
}

// What to ask memory for while a block is multiplied with one tile of tokens of several: with the only tile, what comes
// 8 KiB later; else each tile asks for its share of the next block, so that memory has work all the time. Each line is
// asked for once: twice costs as much as asking for another one.
template <class W>
struct RowsAhead {
    static constexpr int kStrides = W::kGroups / W::kStride, kHalfStrides = 2 * kStrides;
    static constexpr int kStrideBytes = W::kUnitBytes / kStrides;
    static constexpr int kWhole = W::kUnitBytes % 64 == 0 ? 1 : W::kUnitBytes % 32 == 0 ? 2 : 4;  // units: whole lines
    static constexpr int kLines = kWhole * W::kUnitBytes / 64;
    static_assert(64 * kLines == kWhole * W::kUnitBytes);
    static constexpr int kMostAtOnce = 12;  // of more, processors drop some
    const uint8_t* next;
    int64_t bytes;  // with each half of a stride

    RowsAhead(const uint8_t* block, int64_t block_bytes, int64_t tile, int64_t tiles)
        : next(tiles == 1 ? block + kAheadBytes : block + block_bytes + block_bytes * tile / tiles),
          bytes(kStrideBytes / 2 / tiles) {}

    // The lines that begin in the next `bytes`.
    MLXR_INLINE void fetch(RowsAhead& self) {
        const uint8_t* const end = self.next + self.bytes;
        const auto line = reinterpret_cast<uintptr_t>(self.next + 63) / 64 * 64;
        for (auto at = reinterpret_cast<const uint8_t*>(line); at < end; at += 64) __builtin_prefetch(at);
        self.next = end;
    }

    // With the only tile: of the lines from `next` on the share of half a stride, the `Half`th of those of kWhole
    // units; few lines are asked for all at once. Nothing moves across the shares, as loads in the order that compilers
    // like, instead of that of their addresses, take a tenth longer.
    template <int Half>
    MLXR_INLINE void fetch_share(const uint8_t* next) {
        constexpr int kHalves = kLines <= kMostAtOnce ? 1 : kWhole * kHalfStrides, kFirst = kLines * Half / kHalves;
        if constexpr (kHalves > 1) asm volatile("" ::: "memory");
        if constexpr (Half < kHalves) {
            repeat<kLines*(Half + 1) / kHalves - kFirst>(
                [&](int i) MLXR_BODY { __builtin_prefetch(next + 64 * (kFirst + i)); });
        }
    }
};

// One block times M tokens.
template <class W, int M>
void multiply_block(const RowsJob& job, int64_t block, int64_t token, RowsAhead<W> ahead) {
    using Ahead = RowsAhead<W>;
    const uint8_t* base = job.weights + block * job.units * W::kUnitBytes;
    const Activations a = *job.activations;
    for (int part = 0; part < kParts; ++part) {
        const int64_t row = block * kBlockRows + part * kLanes;
        const int valid = static_cast<int>(job.rows - row);
        if (valid <= 0) return;
        Floats sums[M];
        repeat<M>([&](int m) MLXR_BODY { sums[m] = splat(0.0f); });
        const auto add_unit = [&](int64_t u, const auto& add_strides) MLXR_BODY {
            const Unit unit{base + u * W::kUnitBytes, part};
            const int64_t item = u * W::kGroups * a.tile + token;
            Scales s;
            W::scales(unit, s);
            if constexpr (has_spans(W::kForm)) {
                const int64_t span = u * a.tile + token;
                const auto mins_of = [&](int m) MLXR_BODY {
                    return sum_mins<W::kForm>(a, span + m, s.least, [&](int i) MLXR_BODY { return s.mins[i]; });
                };
                Total<W::kForm> spans[M];
                repeat<M>([&](int m) MLXR_BODY { spans[m] = start_span<W::kForm>(mins_of(m)); });
                add_strides(unit, s, item, spans);
                repeat<M>([&](int m) MLXR_BODY {
                    const Floats sum = end_span<W::kForm>(spans[m], s.step[0], mins_of(m));
                    sums[m] = fma(splat(a.scales[span + m]), sum, sums[m]);
                });
            } else {
                add_strides(unit, s, item, sums);
            }
        };
        int64_t u = 0;
        if constexpr (M == 1) {  // one token is the only tile
            for (; u + Ahead::kWhole <= job.units; u += Ahead::kWhole) {
                repeat<Ahead::kWhole>([&](auto i) MLXR_BODY {
                    add_unit(u + i, [&](Unit unit, const Scales& s, int64_t item, auto* to) MLXR_BODY {
                        repeat<Ahead::kStrides>([&](auto n) MLXR_BODY {
                            constexpr int kHalf = i * Ahead::kHalfStrides + 2 * n;
                            if (part == 0) Ahead::template fetch_share<kHalf>(ahead.next);
                            add_stride<W, M, 0>(unit, n, s, a, item, to);
                            if (part == 0) Ahead::template fetch_share<kHalf + 1>(ahead.next);
                        });
                    });
                });
                if (part == 0) ahead.next += 64 * Ahead::kLines;
            }
        }
        for (; u < job.units; ++u) {
            add_unit(u, [&](Unit unit, const Scales& s, int64_t item, auto* to) MLXR_BODY {
                for (int n = 0; n < Ahead::kStrides; ++n) {
                    if (part == 0) Ahead::fetch(ahead);
                    add_stride<W, M, 0>(unit, n, s, a, item, to);
                    if (part == 0) Ahead::fetch(ahead);
                }
            });
        }
        repeat<M>([&](int m) MLXR_BODY {
            if (job.bias != nullptr) sums[m] = add(sums[m], load_some(job.bias + row, valid));
            store_some(job.out + (token + m) * job.out_stride + row, sums[m], valid);
        });
    }
}

// `tokens` tokens, at most M.
template <class W, int M>
MLXR_INLINE void multiply_tokens(const RowsJob& job, int64_t block, int64_t token, int64_t tokens, RowsAhead<W> ahead) {
    if constexpr (M > 1) {
        if (tokens < M) return multiply_tokens<W, M - 1>(job, block, token, tokens, ahead);
    }
    multiply_block<W, M>(job, block, token, ahead);
}

#if defined(MLXR_TIER_avx512)
constexpr int kTokens = 8;  // in a tile, at most
#else
constexpr int kTokens = 4;
#endif

template <class W>
void multiply_rows(const RowsJob& job) {
    const int64_t tiles = (job.tokens + kTokens - 1) / kTokens, block_bytes = job.units * W::kUnitBytes;
    for (int64_t block = job.first_block; block < job.last_block; ++block) {
        const uint8_t* const base = job.weights + block * block_bytes;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t first = job.tokens * tile / tiles, last = job.tokens * (tile + 1) / tiles;
            multiply_tokens<W, kTokens>(job, block, first, last - first, RowsAhead<W>(base, block_bytes, tile, tiles));
        }
    }
}

}  // namespace
