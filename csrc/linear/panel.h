// Many tokens: 32 rows are unpacked once into a panel of bytes and scales that stays in the second-level
// cache, and then multiplied with all tokens, a tile of tokens and rows in registers at a time. Sums as in
// rows.h, bit for bit.
//
// A panel holds for each group, of 32 rows each: 8 words; the step, or for fine forms the pair of scales; the shift if
// there is one, or the step of the other half. Of shorts: 16 words; the exponent, or the step. Before the groups of a
// span: its pairs of minimums and their factor, if it has some; for fine forms the step.
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
    static constexpr int kStep = 8;   // offsets in units of kRowBytes; of fine forms here are the scales
    static constexpr int kShift = 9;  // or the step of the other half
    static constexpr int kBytes = kRowBytes * (is_short(F)                               ? kShortWords + 1
                                               : F == Form::shifted || F == Form::halved ? 10
                                                                                         : 9);
    static constexpr int kLeast = min_pairs(F);  // in what is before a span's groups
    static constexpr int kSpanStep = min_pairs(F) > 0 ? min_pairs(F) + 1 : 0;
    static constexpr int kHeadBytes = kRowBytes * (kSpanStep + is_fine(F));
    static constexpr int kMeanBytes = kBytes + kHeadBytes / mlxr::kSpanGroups;
};

MLXR_INLINE void put_floats(uint8_t* at, int field, Floats value) {
    store_floats(reinterpret_cast<float*>(at + kRowBytes * field), value);
}

// Of group `g` of a unit, `at` the group.
template <Form F>
MLXR_INLINE void store_scales(uint8_t* at, const Scales& s, int g) {
    using P = PanelGroup<F>;
    if constexpr (is_fine(F)) {
        store_ints(at + kRowBytes * P::kStep, s.fine[g]);
    } else {
        put_floats(at, P::kStep, s.step[g]);
    }
    if constexpr (F == Form::shifted) put_floats(at, P::kShift, s.shift[g]);
    if constexpr (F == Form::halved) put_floats(at, P::kShift, s.second[g]);
}

// Of a unit, `at` its first byte.
template <Form F>
MLXR_INLINE void store_head(uint8_t* at, const Scales& s) {
    using P = PanelGroup<F>;
    if constexpr (min_pairs(F) > 0) {
        repeat<min_pairs(F)>([&](int i) MLXR_BODY { store_ints(at + kRowBytes * i, s.mins[i]); });
        put_floats(at, P::kLeast, s.least);
    }
    if constexpr (is_fine(F)) put_floats(at, P::kSpanStep, s.step[0]);
}

template <class W, int J>
MLXR_INLINE void unpack_stride(Unit unit, int n, const Scales& s, uint8_t* at) {
    if constexpr (is_short(W::kForm)) {
        at += n * PanelGroup<W::kForm>::kBytes;
        for (int i = 0; i < kShortWords; i += 2) {
            Ints w[2];
            W::shorts(unit, n, i / 2, w);
            store_ints(at + kRowBytes * i, w[0]);
            store_ints(at + kRowBytes * (i + 1), w[1]);
        }
        store_ints(at + kRowBytes * kShortWords, W::kForm == Form::shorts ? s.exponent : as_ints(s.step[0]));
    } else if constexpr (J < W::kStride) {
        const int g = n * W::kStride + J;
        Ints w[8];
        W::template weights<J>(unit, n, w);
        uint8_t* const group = at + g * PanelGroup<W::kForm>::kBytes;
        for (int i = 0; i < 8; ++i) store_ints(group + kRowBytes * i, w[i]);
        store_scales<W::kForm>(group, s, g);
        unpack_stride<W, J + 1>(unit, n, s, at);
    }
}

template <class W>
void unpack_panel(const UnpackJob& job) {
    using P = PanelGroup<W::kForm>;
    constexpr int kUnitPanelBytes = P::kHeadBytes + W::kGroups * P::kBytes;
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
                store_head<W::kForm>(at + 4 * kLanes * part, s);
                for (int n = 0; n < W::kGroups / W::kStride; ++n) {
                    unpack_stride<W, 0>(unit, n, s, at + P::kHeadBytes + 4 * kLanes * part);
                }
            }
        }
    }
}

// sums[m][v] += N words from the group at `at` times the values of M items. `beside(i)` is called after words 2i and
// 2i+1 of the group, which begin with word First.
template <bool Wide, int M, int First, int N, class Beside>
MLXR_INLINE void add_products(const uint8_t* at, const int8_t* values, Ints (*sums)[kTileVectors],
                              const Beside& beside) {
    at += kRowBytes * First;
    values += 4 * First;
    repeat<N / 2>([&](int pair) MLXR_BODY {
        const int i = 2 * pair;
        Ints w[kTileVectors][2];
        repeat<kTileVectors>([&](int v) MLXR_BODY {
            w[v][0] = load_ints(at + kRowBytes * i + 4 * kLanes * v);
            w[v][1] = load_ints(at + kRowBytes * (i + 1) + 4 * kLanes * v);
        });
        repeat<M>([&](int m) MLXR_BODY {
            const Ints a0 = spread(values + 32 * m + 4 * i), a1 = spread(values + 32 * m + 4 * i + 4);
            repeat<kTileVectors>([&](int v)
                                     MLXR_BODY { sums[m][v] = dot_pair<Wide>(sums[m][v], w[v][0], w[v][1], a0, a1); });
        });
        beside(First / 2 + pair);
    });
}

// Nothing beside the products.
struct Alone {
    MLXR_BODY void operator()(int) const {}
};

MLXR_INLINE Floats floats_at(const uint8_t* at, int field, int v) {
    return as_floats(load_ints(at + kRowBytes * field + 4 * kLanes * v));
}
MLXR_INLINE Ints ints_at(const uint8_t* at, int field, int v) {
    return load_ints(at + kRowBytes * field + 4 * kLanes * v);
}

// total += a group with one step. `item` is the first of the M tokens' items.
template <Form F, bool Wide, int Zero, int M, class Beside>
MLXR_INLINE void add_panel(const uint8_t* at, const Activations& a, int64_t item, Floats (*total)[kTileVectors],
                           const Beside& beside) {
    using P = PanelGroup<F>;
    Ints sums[M][kTileVectors];
    repeat<M>([&](int m) MLXR_BODY {
        repeat<kTileVectors>([&](int v) MLXR_BODY { sums[m][v] = start_group<Wide, Zero>(a, item + m); });
    });
    add_products<Wide, M, 0, 8>(at, a.values + 32 * item, sums, beside);
    repeat<kTileVectors>([&](int v) MLXR_BODY {
        const Floats step = floats_at(at, P::kStep, v);
        repeat<M>([&](int m) MLXR_BODY {
            Floats scaled = step;
            if constexpr (!has_spans(F)) scaled = mul(step, splat(a.scales[item + m]));
            total[m][v] = fma(scaled, to_floats(sums[m][v]), total[m][v]);
            if constexpr (F == Form::shifted) {
                total[m][v] = fma_negated(floats_at(at, P::kShift, v), splat(a.scaled_sums[item + m]), total[m][v]);
            }
        });
    });
}

// The same with a scale for each half of the group.
template <Form F, bool Wide, int Zero, int M, class Beside>
MLXR_INLINE void add_fine_panel(const uint8_t* at, const Activations& a, int64_t item, Ints (*total)[kTileVectors],
                                const Beside& beside) {
    Ints sums[M][kTileVectors];
    repeat<M>([&](int m) MLXR_BODY {
        repeat<kTileVectors>([&](int v) MLXR_BODY { sums[m][v] = start_group<Wide, Zero>(a, 2 * (item + m)); });
    });
    add_products<Wide, M, 0, 4>(at, a.values + 32 * item, sums, beside);
    const auto start_second = [&](int m) MLXR_BODY { return start_second_half<F, Wide, Zero>(a, 2 * (item + m) + 1); };
    repeat<kTileVectors>([&](int v) MLXR_BODY {
        const Ints fine = ints_at(at, PanelGroup<F>::kStep, v);
        repeat<M>([&](int m) MLXR_BODY {
            if constexpr (F == Form::long_fine) {
                total[m][v] = add(total[m][v], mul(sums[m][v], upper_half(fine)));
                sums[m][v] = start_second(m);
            } else {
                sums[m][v] = join_halves(sums[m][v], start_second(m));
            }
        });
    });
    add_products<Wide, M, 4, 4>(at, a.values + 32 * item, sums, beside);
    repeat<kTileVectors>([&](int v) MLXR_BODY {
        const Ints fine = ints_at(at, PanelGroup<F>::kStep, v);
        repeat<M>([&](int m) MLXR_BODY {
            if constexpr (F == Form::long_fine) {
                total[m][v] = add(total[m][v], mul(sums[m][v], lower_half(fine)));
            } else {
                total[m][v] = add_joined(total[m][v], sums[m][v], fine);
            }
        });
    });
}

// The same with a step for each half.
template <bool Wide, int Zero, int M, class Beside>
MLXR_INLINE void add_halved_panel(const uint8_t* at, const Activations& a, int64_t item, Floats (*total)[kTileVectors],
                                  const Beside& beside) {
    using P = PanelGroup<Form::halved>;
    Ints sums[M][kTileVectors];
    const auto add_half = [&](int field) MLXR_BODY {
        repeat<kTileVectors>([&](int v) MLXR_BODY {
            const Floats step = floats_at(at, field, v);
            repeat<M>([&](int m)
                          MLXR_BODY { total[m][v] = add_scaled(sums[m][v], step, a.scales[item + m], total[m][v]); });
        });
    };
    repeat<M>([&](int m) MLXR_BODY {
        repeat<kTileVectors>([&](int v) MLXR_BODY { sums[m][v] = start_group<Wide, Zero>(a, 2 * (item + m)); });
    });
    add_products<Wide, M, 0, 4>(at, a.values + 32 * item, sums, beside);
    add_half(P::kStep);
    repeat<M>([&](int m) MLXR_BODY {
        const Ints start = start_second_half<Form::halved, Wide, Zero>(a, 2 * (item + m) + 1);
        repeat<kTileVectors>([&](int v) MLXR_BODY { sums[m][v] = start; });
    });
    add_products<Wide, M, 4, 4>(at, a.values + 32 * item, sums, beside);
    add_half(P::kShift);
}

// The same for 16-bit weights and activations.
template <Form F, int M>
MLXR_INLINE void add_short_panel(const uint8_t* at, const Activations& a, int64_t item, Floats (*total)[kTileVectors]) {
    const int16_t* values = a.shorts + 32 * item;
    Ints sums[M][kTileVectors];
    repeat<M>([&](int m) MLXR_BODY { repeat<kTileVectors>([&](int v) MLXR_BODY { sums[m][v] = splat(0); }); });
    repeat<kShortWords>([&](int i) MLXR_BODY {
        Ints w[kTileVectors];
        repeat<kTileVectors>([&](int v) MLXR_BODY { w[v] = ints_at(at, i, v); });
        repeat<M>([&](int m) MLXR_BODY {
            const Ints pair = spread(values + 32 * m + 2 * i);
            repeat<kTileVectors>([&](int v) MLXR_BODY { sums[m][v] = dot_shorts(sums[m][v], w[v], pair); });
        });
    });
    repeat<kTileVectors>([&](int v) MLXR_BODY {
        const Ints exponent = ints_at(at, kShortWords, v);
        repeat<M>([&](int m) MLXR_BODY {
            const float scale = a.short_scales[item + m];
            if constexpr (F == Form::shorts) {
                total[m][v] = add_short_sum(sums[m][v], exponent, scale, total[m][v]);
            } else {
                total[m][v] = add_scaled(sums[m][v], as_floats(exponent), scale, total[m][v]);
            }
        });
    });
}

// A group of any kind; shorts have no strips, so nothing goes beside them.
template <Form F, bool Wide, int Zero, int M, class Beside>
MLXR_INLINE void add_panel_group(const uint8_t* at, const Activations& a, int64_t item, Total<F> (*total)[kTileVectors],
                                 const Beside& beside) {
    if constexpr (is_short(F)) {
        add_short_panel<F, M>(at, a, item, total);
    } else if constexpr (F == Form::halved) {
        add_halved_panel<Wide, Zero, M>(at, a, item, total, beside);
    } else if constexpr (is_fine(F)) {
        add_fine_panel<F, Wide, Zero, M>(at, a, item, total, beside);
    } else {
        add_panel<F, Wide, Zero, M>(at, a, item, total, beside);
    }
}

// sum_mins of vector `v` of the span whose part of the panel begins at `head`.
template <Form F>
MLXR_INLINE Floats sum_panel_mins(const uint8_t* head, const Activations& a, int64_t span, int v) {
    const Floats least = min_pairs(F) > 0 ? floats_at(head, PanelGroup<F>::kLeast, v) : splat(0.0f);
    return sum_mins<F>(a, span, least, [&](int i) MLXR_BODY { return ints_at(head, i, v); });
}

// total = where the sums of that span begin.
template <Form F, int M>
MLXR_INLINE void start_panel_span(const uint8_t* head, const Activations& a, int64_t span,
                                  Total<F> (*total)[kTileVectors]) {
    repeat<kTileVectors>([&](int v) MLXR_BODY {
        repeat<M>([&](int m) MLXR_BODY { total[m][v] = start_span<F>(sum_panel_mins<F>(head, a, span + m, v)); });
    });
}

// sums += the sums of that span; of a token they are `stride` floats from those of the one before.
template <Form F, int M>
MLXR_INLINE void add_panel_span(const uint8_t* head, const Activations& a, int64_t span,
                                const Total<F> (*total)[kTileVectors], float* sums, int stride) {
    repeat<kTileVectors>([&](int v) MLXR_BODY {
        const Floats step = is_fine(F) ? floats_at(head, PanelGroup<F>::kSpanStep, v) : splat(0.0f);
        repeat<M>([&](int m) MLXR_BODY {
            float* const at = sums + stride * m + kLanes * v;
            const Floats sum = end_span<F>(total[m][v], step, sum_panel_mins<F>(head, a, span + m, v));
            store_floats(at, fma(splat(a.scales[span + m]), sum, load_floats(at)));
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
    repeat<M>([&](int m) MLXR_BODY {
        repeat<kTileVectors>([&](int v) MLXR_BODY {
            total[m][v] = splat(0.0f);
            if (job.first_group > 0) total[m][v] = load_some(out + m * job.out_stride + kLanes * v, valid - kLanes * v);
        });
    });
    const uint8_t* at = job.panel + 4 * column;
    int64_t item = mlxr::item_index(a, token, job.first_group);
    const auto add_groups = [&](int64_t count, auto* to) MLXR_BODY {
        for (int64_t group = 0; group < count; ++group, at += P::kBytes, item += a.tile) {
            add_panel_group<F, Wide, Zero, M>(at, a, item, to, Alone{});
        }
    };
    if constexpr (has_spans(F)) {
        // In memory, as registers are scarce.
        alignas(64) float sums[M * kTileRows];
        repeat<M>([&](int m) MLXR_BODY {
            repeat<kTileVectors>([&](int v)
                                     MLXR_BODY { store_floats(sums + kTileRows * m + kLanes * v, total[m][v]); });
        });
        int64_t span = mlxr::span_index(a, token, job.first_group / mlxr::kSpanGroups);
        const int64_t count = (job.last_group - job.first_group) / mlxr::kSpanGroups;
        for (int64_t i = 0; i < count; ++i, span += a.tile) {
            const uint8_t* const head = at;
            Total<F> spans[M][kTileVectors];
            start_panel_span<F, M>(head, a, span, spans);
            at += P::kHeadBytes;
            add_groups(mlxr::kSpanGroups, spans);
            add_panel_span<F, M>(head, a, span, spans, sums, kTileRows);
        }
        repeat<M>([&](int m) MLXR_BODY {
            repeat<kTileVectors>([&](int v)
                                     MLXR_BODY { total[m][v] = load_floats(sums + kTileRows * m + kLanes * v); });
        });
    } else {
        add_groups(job.last_group - job.first_group, total);
    }
    repeat<M>([&](int m) MLXR_BODY {
        repeat<kTileVectors>([&](int v) MLXR_BODY {
            const int first = kLanes * v;
            if (job.bias != nullptr) {
                total[m][v] = add(total[m][v], load_some(job.bias + column + first, valid - first));
            }
            store_some(out + m * job.out_stride + first, total[m][v], valid - first);
        });
    });
}

// Tokens in a register tile: as many as the registers hold with their sums.
#if defined(MLXR_TIER_avx512)
constexpr int kPanelTokens = 6;
#elif defined(MLXR_TIER_neon)
constexpr int kPanelTokens = 4;
#else
constexpr int kPanelTokens = 2;
#endif
static_assert(mlxr::kTileTokens % kPanelTokens == 0);

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
    int64_t token = job.first_token;
    for (; token + kPanelTokens <= job.last_token; token += kPanelTokens) {
        for (int column = 0; column < job.rows; column += kTileRows) {
            multiply_tile<F, Wide, Zero, kPanelTokens>(job, token, column);
        }
    }
    for (int column = 0; column < job.rows; column += kTileRows) {
        multiply_rest<F, Wide, Zero, kPanelTokens - 1>(job, token, column);
    }
}

}  // namespace
