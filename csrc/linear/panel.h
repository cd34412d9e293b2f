// Many tokens: 32 rows are unpacked once into a panel of bytes and scales that stays in the second-level
// cache, and then multiplied with all tokens, a tile of tokens and rows in registers at a time. Sums as in
// rows.h, bit for bit.
//
// A panel holds for each group, of 32 rows each: 8 words; the step, or for fine forms the steps of both halves; then by
// form the shift, and fine_shift (2). Of shorts: 16 words; the exponent.
#pragma once

#include "linear/unpack.h"

namespace {

using mlxr::Activations;
using mlxr::kPanelRows;
using mlxr::PanelJob;
using mlxr::UnpackJob;

constexpr int kRowBytes = 4 * kPanelRows;
constexpr int kTileVectors = 2;
constexpr int kTileRows = kTileVectors * kLanes;

template <Form F>
struct PanelGroup {
    static constexpr bool kShifted = F == Form::shifted || F == Form::fine_shifted;
    static constexpr bool kFine = F == Form::fine || F == Form::fine_shifted;
    static constexpr int kStep = 8;  // offsets in units of kRowBytes
    static constexpr int kShift = 9;
    static constexpr int kFineStep = 8;
    static constexpr int kFineShift = 10;
    static constexpr int kFineShiftAt = 11;
    static constexpr int kBytes = kRowBytes * (F == Form::plain     ? 9
                                               : F == Form::shifted ? 10
                                               : F == Form::fine    ? 10
                                               : F == Form::shorts  ? kShortWords + 1
                                                                    : 13);
};

template <Form F>
MLXR_INLINE void store_group(uint8_t* at, const Ints* w, const Scales& s, int g) {
    using P = PanelGroup<F>;
    for (int i = 0; i < 8; ++i) store_ints(at + kRowBytes * i, w[i]);
    const auto put = [at](int field, Floats value)
                         MLXR_BODY { store_floats(reinterpret_cast<float*>(at + kRowBytes * field), value); };
    if constexpr (P::kFine) {
        put(P::kFineStep, fine_step(s, 2 * g));
        put(P::kFineStep + 1, fine_step(s, 2 * g + 1));
    } else {
        put(P::kStep, s.step[g]);
    }
    if constexpr (F == Form::shifted) put(P::kShift, s.shift[g]);
    if constexpr (F == Form::fine_shifted) {
        put(P::kFineShift, s.shift[g]);
        store_ints(at + kRowBytes * P::kFineShiftAt, s.fine_shift[2 * g]);
        store_ints(at + kRowBytes * (P::kFineShiftAt + 1), s.fine_shift[2 * g + 1]);
    }
}

template <class W, int J>
MLXR_INLINE void unpack_stride(Unit unit, int n, const Scales& s, uint8_t* at) {
    if constexpr (W::kForm == Form::shorts) {
        at += n * PanelGroup<W::kForm>::kBytes;
        for (int i = 0; i < kShortWords; ++i) store_ints(at + kRowBytes * i, word(unit, kShortWords * n + i));
        store_ints(at + kRowBytes * kShortWords, s.exponent[n]);
    } else if constexpr (J < W::kStride) {
        const int g = n * W::kStride + J;
        Ints w[8];
        W::template weights<J>(unit, n, w);
        store_group<W::kForm>(at + g * PanelGroup<W::kForm>::kBytes, w, s, g);
        unpack_stride<W, J + 1>(unit, n, s, at);
    }
}

template <class W>
void unpack_panel(const UnpackJob& job) {
    constexpr int kUnitPanelBytes = W::kGroups * PanelGroup<W::kForm>::kBytes;
    for (int index = 0; index < kPanelRows / kBlockRows; ++index) {
        const int64_t block = job.block + index;
        for (int64_t u = job.first_unit; u < job.last_unit; ++u) {
            uint8_t* at = job.panel + (u - job.first_unit) * kUnitPanelBytes + 4 * kBlockRows * index;
            if (block >= job.blocks) {
                for (int i = 0; i < kUnitPanelBytes / kRowBytes; ++i) memset(at + kRowBytes * i, 0, 4 * kBlockRows);
                continue;
            }
            for (int part = 0; part < kParts; ++part) {
                const Unit unit{job.weights + (block * job.units + u) * W::kUnitBytes, part};
                if (part == 0) prefetch_ahead(unit.base, W::kUnitBytes);
                Scales s;
                W::scales(unit, s);
                for (int n = 0; n < W::kGroups / W::kStride; ++n) {
                    unpack_stride<W, 0>(unit, n, s, at + 4 * kLanes * part);
                }
            }
        }
    }
}

// sums[m][v] += N words from the group at `at` times the values of M items.
template <bool Wide, int M, int N>
MLXR_INLINE void add_products(const uint8_t* at, const int8_t* values, Ints (*sums)[kTileVectors]) {
    repeat<N / 2>([&](auto pair) MLXR_BODY {
        constexpr int i = 2 * pair;
        Ints w[kTileVectors][2];
        repeat<kTileVectors>([&](auto v) MLXR_BODY {
            w[v][0] = load_ints(at + kRowBytes * i + 4 * kLanes * v);
            w[v][1] = load_ints(at + kRowBytes * (i + 1) + 4 * kLanes * v);
        });
        repeat<M>([&](auto m) MLXR_BODY {
            const Ints a0 = spread(values + 32 * m + 4 * i), a1 = spread(values + 32 * m + 4 * i + 4);
            repeat<kTileVectors>([&](auto v)
                                     MLXR_BODY { sums[m][v] = dot_pair<Wide>(sums[m][v], w[v][0], w[v][1], a0, a1); });
        });
    });
}

MLXR_INLINE Floats floats_at(const uint8_t* at, int field, int v) {
    return as_floats(load_ints(at + kRowBytes * field + 4 * kLanes * v));
}
MLXR_INLINE Ints ints_at(const uint8_t* at, int field, int v) {
    return load_ints(at + kRowBytes * field + 4 * kLanes * v);
}

// One step of each sum for a group, of one scale: plus one more where the form has a shift. `item` is the first of the
// M tokens' items.
template <Form F, bool Wide, int Zero, int M>
MLXR_INLINE void add_panel(const uint8_t* at, const Activations& a, int64_t item, Floats (*total)[kTileVectors]) {
    using P = PanelGroup<F>;
    Ints sums[M][kTileVectors];
    repeat<M>([&](auto m) MLXR_BODY {
        repeat<kTileVectors>([&](auto v) MLXR_BODY { sums[m][v] = start_group<Wide, Zero>(a, item + m); });
    });
    add_products<Wide, M, 8>(at, a.values + 32 * item, sums);
    repeat<kTileVectors>([&](auto v) MLXR_BODY {
        const Floats step = floats_at(at, P::kStep, v);
        repeat<M>([&](auto m) MLXR_BODY {
            total[m][v] = fma(mul(step, splat(a.scales[item + m])), to_floats(sums[m][v]), total[m][v]);
            if constexpr (F == Form::shifted) {
                total[m][v] = fma_negated(floats_at(at, P::kShift, v), splat(a.scaled_sums[item + m]), total[m][v]);
            }
        });
    });
}

// The same with a scale for each half of the group.
template <Form F, bool Wide, int Zero, int M>
MLXR_INLINE void add_fine_panel(const uint8_t* at, const Activations& a, int64_t item, Floats (*total)[kTileVectors]) {
    using P = PanelGroup<F>;
    Ints sums[M][kTileVectors], second[M][kTileVectors];
    repeat<M>([&](auto m) MLXR_BODY {
        repeat<kTileVectors>([&](auto v) MLXR_BODY {
            sums[m][v] = start_group<Wide, Zero>(a, 2 * (item + m));
            second[m][v] = start_group<Wide, Zero>(a, 2 * (item + m) + 1);
        });
    });
    add_products<Wide, M, 4>(at, a.values + 32 * item, sums);
    add_products<Wide, M, 4>(at + 4 * kRowBytes, a.values + 32 * item + 16, second);
    repeat<kTileVectors>([&](auto v) MLXR_BODY {
        const Floats step = floats_at(at, P::kFineStep, v), second_step = floats_at(at, P::kFineStep + 1, v);
        repeat<M>([&](auto m) MLXR_BODY {
            const Floats scale = splat(a.scales[item + m]);
            const Floats first = mul(step, to_floats(sums[m][v]));
            total[m][v] = fma(scale, fma(second_step, to_floats(second[m][v]), first), total[m][v]);
            if constexpr (F == Form::fine_shifted) {
                const int32_t* half_sums = a.half_sums + 2 * (item + m);
                const Ints sum = add(mul(ints_at(at, P::kFineShiftAt, v), splat(half_sums[0])),
                                     mul(ints_at(at, P::kFineShiftAt + 1, v), splat(half_sums[1])));
                total[m][v] = fma_negated(mul(floats_at(at, P::kFineShift, v), scale), to_floats(sum), total[m][v]);
            }
        });
    });
}

// The same for 16-bit weights and activations.
template <int M>
MLXR_INLINE void add_short_panel(const uint8_t* at, const Activations& a, int64_t item, Floats (*total)[kTileVectors]) {
    const int16_t* values = a.shorts + 32 * item;
    Ints sums[M][kTileVectors];
    repeat<M>([&](auto m) MLXR_BODY { repeat<kTileVectors>([&](auto v) MLXR_BODY { sums[m][v] = splat(0); }); });
    repeat<kShortWords>([&](auto i) MLXR_BODY {
        Ints w[kTileVectors];
        repeat<kTileVectors>([&](auto v) MLXR_BODY { w[v] = ints_at(at, i, v); });
        repeat<M>([&](auto m) MLXR_BODY {
            const Ints pair = spread(values + 32 * m + 2 * i);
            repeat<kTileVectors>([&](auto v) MLXR_BODY { sums[m][v] = dot_shorts(sums[m][v], w[v], pair); });
        });
    });
    repeat<kTileVectors>([&](auto v) MLXR_BODY {
        const Ints exponent = ints_at(at, kShortWords, v);
        repeat<M>([&](auto m) MLXR_BODY {
            total[m][v] = add_short_sum(sums[m][v], exponent, a.short_scales[item + m], total[m][v]);
        });
    });
}

// M tokens, which lie in one tile, times kTileRows rows from row `column` of the panel.
template <Form F, bool Wide, int Zero, int M>
void multiply_tile(const PanelJob& job, int64_t token, int column) {
    using P = PanelGroup<F>;
    const Activations a = *job.activations;
    const int valid = static_cast<int>(job.rows) - column;
    float* out = job.out + (token - job.first_token) * job.out_stride + column;
    Floats total[M][kTileVectors];
    repeat<M>([&](auto m) MLXR_BODY {
        repeat<kTileVectors>([&](auto v) MLXR_BODY {
            total[m][v] = splat(0.0f);
            if (job.first_group > 0) total[m][v] = load_some(out + m * job.out_stride + kLanes * v, valid - kLanes * v);
        });
    });
    const uint8_t* at = job.panel + 4 * column;
    int64_t item = mlxr::item_index(a, token, job.first_group);
    for (int64_t group = job.first_group; group < job.last_group; ++group, at += P::kBytes, item += a.tile) {
        if constexpr (F == Form::shorts) {
            add_short_panel<M>(at, a, item, total);
        } else if constexpr (P::kFine) {
            add_fine_panel<F, Wide, Zero, M>(at, a, item, total);
        } else {
            add_panel<F, Wide, Zero, M>(at, a, item, total);
        }
    }
    repeat<M>([&](auto m) MLXR_BODY {
        repeat<kTileVectors>([&](auto v) MLXR_BODY {
            const int first = kLanes * v;
            if (job.bias != nullptr) {
                total[m][v] = add(total[m][v], load_some(job.bias + column + first, valid - first));
            }
            store_some(out + m * job.out_stride + first, total[m][v], valid - first);
        });
    });
}

// Tokens in a register tile: as many as the registers hold with their sums.
template <Form F>
constexpr int tile_tokens() {  // divides kTileTokens
#if defined(MLXR_TIER_avx512)
    return PanelGroup<F>::kFine ? 4 : 6;
#else
    return 2;
#endif
}

template <Form F, bool Wide, int Zero, int M>
MLXR_INLINE void multiply_rest(const PanelJob& job, int64_t token, int column) {
    if constexpr (M > 0) {
        if (job.last_token - token == M) {
            multiply_tile<F, Wide, Zero, M>(job, token, column);
        } else {
            multiply_rest<F, Wide, Zero, M - 1>(job, token, column);
        }
    }
}

template <Form F, bool Wide, int Zero>
void multiply_panel(const PanelJob& job) {
    constexpr int kTile = tile_tokens<F>();
    int64_t token = job.first_token;
    for (; token + kTile <= job.last_token; token += kTile) {
        for (int column = 0; column < job.rows; column += kTileRows) {
            multiply_tile<F, Wide, Zero, kTile>(job, token, column);
        }
    }
    for (int column = 0; column < job.rows; column += kTileRows) {
        multiply_rest<F, Wide, Zero, kTile - 1>(job, token, column);
    }
}

}  // namespace
