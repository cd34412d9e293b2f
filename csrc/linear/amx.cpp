// Panels by AMX: the avx512 tier but for products of many tokens with quantised weights, whose sums of bytes the tiles
// of the processor make. They are exact integers, and what follows them is done as in panel.h, so the bits are those of
// the other tiers.
//
// A panel is that of panel.h with bytes that have a sign: their zero points are taken away. A product is a tile of up
// to 12 tokens times a group's 32 columns of 16 rows. Its 32-bit sums go through memory into vectors, which scale and
// add them. Fine forms multiply each byte with its integer scale first, in two digits of base 128: so their sums over a
// whole span come out of the tiles, and are scaled once.
//
// Some groups of a panel at a time stay in the first-level cache while all tokens of a call pass.
#include <type_traits>

#include "linear/panel.h"
#include "operators/operator_table.h"
#include "probe/probe_table.h"

namespace {

using mlxr::QuantKernels;

constexpr int kTokens = static_cast<int>(mlxr::kTileTokens);
constexpr int64_t kCallTokens = 96;  // whose sums lie in an array on the stack
constexpr int64_t kBlockGroups = 16;
constexpr int kTileSums = kTokens * kPanelRows;

// Tile registers by number: sums of up to four products, activations, weights. The assembler knows the instructions,
// whatever the compiler may use.
constexpr int kValues = 4, kWeights = 5;

template <int Tile>
MLXR_INLINE void load_tile(const void* at, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(at), "r"(stride), "n"(Tile) : "memory");
}
template <int Tile>
MLXR_INLINE void store_tile(void* at, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(at), "r"(stride), "n"(Tile) : "memory");
}
template <int Tile>
MLXR_INLINE void clear_tile() {
    asm volatile("tilezero %%tmm%c0" : : "n"(Tile));
}
template <int Sum, int A, int B>
MLXR_INLINE void add_tiles() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "n"(Sum), "n"(A), "n"(B));
}

// What LDTILECFG reads.
struct Shapes {
    uint8_t palette, first_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(Shapes) == 64);

thread_local int shaped = 0;  // tokens of this thread's tiles, and 16 times their words of a row; 0: released

// Tiles of `tokens` tokens and `words` words, of four columns each.
MLXR_INLINE void shape_tiles(int tokens, int words) {
    const int wanted = tokens + 16 * words;
    if (shaped == wanted) return;
    shaped = wanted;
    alignas(64) Shapes shapes{};
    shapes.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
        shapes.row_bytes[tile] = static_cast<uint16_t>(tile == kValues ? 4 * words : 4 * kBlockRows);
        shapes.rows[tile] = static_cast<uint8_t>(tile < kWeights ? tokens : words);
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
}

void release_tiles() {
    if (shaped == 0) return;
    shaped = 0;
    asm volatile("tilerelease");
}

MLXR_INLINE int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

// Items from a tile of tokens to the next, and spans.
MLXR_INLINE int64_t items_of_tile(const Activations& a) {
    return a.tile > kTokens ? kTokens : a.groups * a.tile;
}
MLXR_INLINE int64_t spans_of_tile(const Activations& a) {
    return a.tile > kTokens ? kTokens : a.groups / mlxr::kSpanGroups * a.tile;
}

// The sums of a group, whose words begin at `at`, in tiles Sums and Sums + 1; to rows of kPanelRows.
template <int Sums>
MLXR_INLINE void multiply_group(const uint8_t* at, const int8_t* values) {
    load_tile<kValues>(values, mlxr::kGroupColumns);
    repeat<kTileVectors>([&](auto v) MLXR_BODY {
        clear_tile<Sums + v>();
        load_tile<kWeights + v>(at + 4 * kLanes * v, kRowBytes);
        add_tiles<Sums + v, kValues, kWeights + v>();
    });
}
template <int Sums>
MLXR_INLINE void store_group(int32_t* products) {
    repeat<kTileVectors>([&](auto v) MLXR_BODY { store_tile<Sums + v>(products + kLanes * v, kRowBytes); });
}

// total += the sums of a group of M tokens, as add_panel does. `beside(m)` is called before those of each.
template <Form F, int M, class Beside>
MLXR_INLINE void scale_group(const uint8_t* at, const Activations& a, int64_t item, const int32_t* products,
                             Floats (*total)[kTileVectors], const Beside& beside) {
    using P = PanelGroup<F>;
    repeat<M>([&](auto m) MLXR_BODY {
        beside(m);
        repeat<kTileVectors>([&](auto v) MLXR_BODY {
            Floats scaled = floats_at(at, P::kStep, v);
            if constexpr (!has_spans(F)) scaled = mul(scaled, splat(a.scales[item + m]));
            const Ints sum = load_ints(products + kPanelRows * m + kLanes * v);
            total[m][v] = fma(scaled, to_floats(sum), total[m][v]);
            if constexpr (F == Form::shifted) {
                total[m][v] = fma_negated(floats_at(at, P::kShift, v), splat(a.scaled_sums[item + m]), total[m][v]);
            }
        });
    });
}

template <int M>
MLXR_INLINE void load_totals(const float* sums, Floats (*total)[kTileVectors]) {
    repeat<M>([&](auto m) MLXR_BODY {
        repeat<kTileVectors>([&](auto v) MLXR_BODY { total[m][v] = load_floats(sums + kPanelRows * m + kLanes * v); });
    });
}
template <int M>
MLXR_INLINE void store_totals(float* sums, const Floats (*total)[kTileVectors]) {
    repeat<M>([&](auto m) MLXR_BODY {
        repeat<kTileVectors>([&](auto v) MLXR_BODY { store_floats(sums + kPanelRows * m + kLanes * v, total[m][v]); });
    });
}

// The groups of a block of a panel, of one tile of tokens after another; behind the last that one again.
template <Form F>
struct NextGroup {
    using P = PanelGroup<F>;
    const Activations& a;
    const uint8_t* const block;
    const int64_t groups;
    int64_t tile_item, left;  // of the tile's first group; groups of all tiles
    int64_t group = 0, item = tile_item;
    const uint8_t* at = block + P::kHeadBytes;

    const int8_t* values() const { return a.values + mlxr::kGroupColumns * item; }

    MLXR_BODY inline void go_on() {
        if (left <= 1) return;
        --left;
        at += P::kBytes;
        item += a.tile;
        if (++group == groups) {
            group = 0;
            at = block + P::kHeadBytes;
            item = tile_item += items_of_tile(a);
        } else if (has_spans(F) && group % mlxr::kSpanGroups == 0) {
            at += P::kHeadBytes;
        }
    }
};

// total += a group whose products are there. Between its tokens, the products of the group after the next, in tiles
// Sums and Sums + 1, and those of the next go to memory.
template <Form F, int Sums>
MLXR_INLINE void add_group(const uint8_t* at, const Activations& a, int64_t item, const int32_t* products,
                           int32_t* next_products, const NextGroup<F>& next, Floats (*total)[kTileVectors]) {
    constexpr int kStored = kTileVectors - Sums;
    scale_group<F, kTokens>(at, a, item, products, total, [&](auto m) MLXR_BODY {
        if constexpr (m == 0) load_tile<kValues>(next.values(), mlxr::kGroupColumns);
        if constexpr (m == 1 || m == 6) {
            clear_tile<Sums + m / 6>();
            load_tile<kWeights + m / 6>(next.at + 4 * kLanes * (m / 6), kRowBytes);
        }
        if constexpr (m == 2 || m == 7) add_tiles<Sums + m / 6, kValues, kWeights + m / 6>();
        if constexpr (m == 4 || m == 9) store_tile<kStored + m / 6>(next_products + kLanes * (m / 6), kRowBytes);
    });
}

// sums += `groups` groups of whole tiles of tokens, the first of which have the items `item` and `span`.
template <Form F>
void add_block(const uint8_t* block, Activations a, int64_t item, int64_t span, int64_t groups, int64_t tiles,
               float* sums) {
    using P = PanelGroup<F>;
    alignas(64) int32_t products[2][kTileSums];
    NextGroup<F> next{a, block, groups, item, groups * tiles};
    multiply_group<0>(next.at, next.values());
    store_group<0>(products[0]);
    next.go_on();
    multiply_group<2>(next.at, next.values());
    next.go_on();
    int64_t turn = 0;
    for (int64_t tile = 0; tile < tiles; ++tile, sums += kTileSums) {
        const uint8_t* at = block;
        int64_t own_item = item + tile * items_of_tile(a), own_span = span + tile * spans_of_tile(a);
        Floats total[kTokens][kTileVectors];
        const auto add_groups = [&](int64_t count) MLXR_BODY {
            for (int64_t group = 0; group < count; ++group, ++turn, at += P::kBytes, own_item += a.tile) {
                if (turn & 1) {
                    add_group<F, 2>(at, a, own_item, products[1], products[0], next, total);
                } else {
                    add_group<F, 0>(at, a, own_item, products[0], products[1], next, total);
                }
                next.go_on();
            }
        };
        if constexpr (has_spans(F)) {
            for (int64_t left = groups; left > 0; left -= mlxr::kSpanGroups, own_span += a.tile) {
                const uint8_t* const head = at;
                start_panel_span<F, kTokens>(head, a, own_span, total);
                at += P::kHeadBytes;
                add_groups(mlxr::kSpanGroups);
                add_panel_span<F, kTokens>(head, a, own_span, total, sums, kPanelRows);
            }
        } else {
            load_totals<kTokens>(sums, total);
            add_groups(groups);
            store_totals<kTokens>(sums, total);
        }
    }
}

// The same of fewer tokens than a tile has.
template <Form F>
void add_rest(const uint8_t* at, Activations a, int64_t item, int64_t span, int64_t groups, int tokens, float* sums) {
    using P = PanelGroup<F>;
    alignas(64) int32_t products[kTileSums];
    Floats total[kTokens][kTileVectors];
    const auto each = [&](const auto& body) MLXR_BODY {
        for (int m = 0; m < tokens; ++m) body(m, total + m, sums + kPanelRows * m);
    };
    const auto add_groups = [&](int64_t count) MLXR_BODY {
        for (int64_t group = 0; group < count; ++group, at += P::kBytes, item += a.tile) {
            multiply_group<0>(at, a.values + mlxr::kGroupColumns * item);
            store_group<0>(products);
            each([&](int m, auto* to, float*)
                     MLXR_BODY { scale_group<F, 1>(at, a, item + m, products + kPanelRows * m, to, Alone{}); });
        }
    };
    if constexpr (has_spans(F)) {
        for (; groups > 0; groups -= mlxr::kSpanGroups, span += a.tile) {
            const uint8_t* const head = at;
            each([&](int m, auto* to, float*) MLXR_BODY { start_panel_span<F, 1>(head, a, span + m, to); });
            at += P::kHeadBytes;
            add_groups(mlxr::kSpanGroups);
            each([&](int m, auto* from, float* to)
                     MLXR_BODY { add_panel_span<F, 1>(head, a, span + m, from, to, kPanelRows); });
        }
    } else {
        each([&](int, auto* to, const float* from) MLXR_BODY { load_totals<1>(from, to); });
        add_groups(groups);
        each([&](int, const auto* from, float* to) MLXR_BODY { store_totals<1>(to, from); });
    }
}

// Of fine forms a panel holds for each span: its pairs of minimums and their factor, if it has some, and the step, as
// in panel.h; then for each pair of groups 16 words of lower digits, and of upper ones. Those of fine_shifted have no
// upper ones: 15 times 3 is a byte.
template <Form F>
struct FinePanel {
    static constexpr int kDigits = F == Form::fine_shifted ? 1 : 2;
    static constexpr int kPairWords = 2 * mlxr::kGroupColumns / 4;
    static constexpr int kPairBytes = kDigits * kPairWords * kRowBytes;
    static constexpr int kPairs = mlxr::kSpanGroups / 2;
    static constexpr int kHeadBytes = PanelGroup<F>::kHeadBytes;
    static constexpr int kBytes = kHeadBytes + kPairs * kPairBytes;
};

constexpr int kPairColumns = 2 * mlxr::kGroupColumns;
constexpr int kSpanValues = kTokens * mlxr::kSpanGroups * mlxr::kGroupColumns;

// The values of a span with those of two groups side by side, a pair of groups after another; of whole tiles, and of
// fewer tokens. `stride` is from one group to the next.
MLXR_INLINE void pair_values(const int8_t* values, int64_t stride, int8_t* to) {
    for (int pair = 0; pair < mlxr::kSpanGroups / 2; ++pair, values += 2 * stride) {
        repeat<kTokens / 2>([&](auto i) MLXR_BODY {
            const Ints first = load_ints(values + 64 * i), second = load_ints(values + stride + 64 * i);
            store_ints(to, _mm512_shuffle_i64x2(first, second, 0x44));
            store_ints(to + kPairColumns, _mm512_shuffle_i64x2(first, second, 0xee));
            to += 2 * kPairColumns;
        });
    }
}
MLXR_INLINE void pair_some_values(const int8_t* values, int64_t stride, int tokens, int8_t* to) {
    for (int group = 0; group < mlxr::kSpanGroups; ++group, values += stride) {
        int8_t* const first = to + group / 2 * kTokens * kPairColumns + group % 2 * mlxr::kGroupColumns;
        for (int m = 0; m < tokens; ++m) {
            memcpy(first + kPairColumns * m, values + mlxr::kGroupColumns * m, mlxr::kGroupColumns);
        }
    }
}

// The sums of a span of a fine form: of lower digits, then of upper ones.
template <Form F>
MLXR_INLINE void multiply_span(const uint8_t* span, const int8_t* values, int32_t* products) {
    using P = FinePanel<F>;
    constexpr int kSums = kTileVectors * P::kDigits;
    repeat<kSums>([&](auto i) MLXR_BODY { clear_tile<i>(); });
    const uint8_t* at = span + P::kHeadBytes;
    repeat<P::kPairs>([&](auto pair) MLXR_BODY {
        load_tile<kValues>(values + kTokens * kPairColumns * pair, kPairColumns);
        repeat<kSums>([&](auto i) MLXR_BODY {
            constexpr int kTile = kWeights + i % 2, digit = i / kTileVectors, v = i % kTileVectors;
            load_tile<kTile>(at + digit * P::kPairWords * kRowBytes + 4 * kLanes * v, kRowBytes);
            add_tiles<i, kValues, kTile>();
        });
        at += P::kPairBytes;
    });
    repeat<kSums>([&](auto i) MLXR_BODY {
        store_tile<i>(products + i / kTileVectors * kTileSums + kLanes * (i % kTileVectors), kRowBytes);
    });
}

// sums += a span of M tokens.
template <Form F, int M>
MLXR_INLINE void scale_span(const uint8_t* span, const Activations& a, int64_t index, const int32_t* products,
                            float* sums) {
    Ints total[M][kTileVectors];
    repeat<M>([&](auto m) MLXR_BODY {
        repeat<kTileVectors>([&](auto v) MLXR_BODY {
            const int32_t* const at = products + kPanelRows * m + kLanes * v;
            total[m][v] = load_ints(at);
            if constexpr (FinePanel<F>::kDigits == 2) {
                total[m][v] = add(total[m][v], shift_left(load_ints(at + kTileSums), 7));
            }
        });
    });
    add_panel_span<F, M>(span, a, index, total, sums, kPanelRows);
}

// add_block and add_rest of fine forms, a span at a time.
template <Form F>
void add_fine_block(const uint8_t* block, Activations a, int64_t item, int64_t span, int64_t tiles, float* sums) {
    alignas(64) int32_t products[2][FinePanel<F>::kDigits * kTileSums];
    alignas(64) int8_t values[2][kSpanValues];
    const auto multiply = [&](int64_t tile) MLXR_BODY {
        pair_values(a.values + mlxr::kGroupColumns * (item + tile * items_of_tile(a)), mlxr::kGroupColumns * a.tile,
                    values[tile & 1]);
        multiply_span<F>(block, values[tile & 1], products[tile & 1]);
    };
    multiply(0);
    for (int64_t tile = 0; tile < tiles; ++tile, sums += kTileSums, span += spans_of_tile(a)) {
        if (tile + 1 < tiles) multiply(tile + 1);
        scale_span<F, kTokens>(block, a, span, products[tile & 1], sums);
    }
}
template <Form F>
void add_fine_rest(const uint8_t* block, Activations a, int64_t item, int64_t span, int tokens, float* sums) {
    alignas(64) int32_t products[FinePanel<F>::kDigits * kTileSums];
    alignas(64) int8_t values[kSpanValues];
    pair_some_values(a.values + mlxr::kGroupColumns * item, mlxr::kGroupColumns * a.tile, tokens, values);
    multiply_span<F>(block, values, products);
    for (int m = 0; m < tokens; ++m) {
        scale_span<F, 1>(block, a, span + m, products + kPanelRows * m, sums + kPanelRows * m);
    }
}

// The panel of a job: what its forms have in common.
template <Form F>
struct Panel {
    static constexpr int64_t kBlock = is_fine(F) ? mlxr::kSpanGroups : kBlockGroups;
    static constexpr int kMeanBytes = is_fine(F) ? FinePanel<F>::kBytes / mlxr::kSpanGroups : PanelGroup<F>::kMeanBytes;
    static constexpr int kWords = is_fine(F) ? FinePanel<F>::kPairWords : mlxr::kGroupColumns / 4;

    static void add(const uint8_t* at, const Activations& a, int64_t item, int64_t span, int64_t groups, int64_t tiles,
                    float* sums) {
        if constexpr (is_fine(F)) {
            add_fine_block<F>(at, a, item, span, tiles, sums);
        } else {
            add_block<F>(at, a, item, span, groups, tiles, sums);
        }
    }
    static void add_rest_of(const uint8_t* at, const Activations& a, int64_t item, int64_t span, int64_t groups,
                            int tokens, float* sums) {
        if constexpr (is_fine(F)) {
            add_fine_rest<F>(at, a, item, span, tokens, sums);
        } else {
            add_rest<F>(at, a, item, span, groups, tokens, sums);
        }
    }
};

// sums of `count` tokens += all groups of a panel. Tokens that fill no tile come last: their tiles have another shape.
template <Form F>
void add_panel_groups(const PanelJob& job, int64_t token, int64_t count, float* sums) {
    using P = Panel<F>;
    const Activations a = *job.activations;
    const int64_t tiles = count / kTokens;
    const int rest = static_cast<int>(count % kTokens);
    const auto visit = [&](int64_t first, const auto& body) {
        const uint8_t* at = job.panel;
        for (int64_t group = job.first_group; group < job.last_group;) {
            const int64_t groups = least(P::kBlock, job.last_group - group);
            body(at, mlxr::item_index(a, first, group), mlxr::span_index(a, first, group / mlxr::kSpanGroups), groups);
            at += groups * P::kMeanBytes;
            group += groups;
        }
    };
    if (tiles > 0) {
        shape_tiles(kTokens, P::kWords);
        visit(token, [&](const uint8_t* at, int64_t item, int64_t span, int64_t groups) {
            P::add(at, a, item, span, groups, tiles, sums);
        });
    }
    if (rest > 0) {
        shape_tiles(rest, P::kWords);
        visit(token + tiles * kTokens, [&](const uint8_t* at, int64_t item, int64_t span, int64_t groups) {
            P::add_rest_of(at, a, item, span, groups, rest, sums + tiles * kTileSums);
        });
    }
}

// body(sums, result, its valid lanes, first row) of every vector of sums.
template <class Body>
MLXR_INLINE void visit_sums(const PanelJob& job, int64_t token, int64_t count, float* sums, const Body& body) {
    float* out = job.out + (token - job.first_token) * job.out_stride;
    for (int64_t i = 0; i < count; ++i, out += job.out_stride, sums += kPanelRows) {
        for (int row = 0; row < kPanelRows; row += kLanes) {
            body(sums + row, out + row, static_cast<int>(job.rows) - row, row);
        }
    }
}

template <Form F>
void multiply_tokens(const PanelJob& job) {
    alignas(64) float sums[kCallTokens * kPanelRows];
    for (int64_t token = job.first_token; token < job.last_token; token += kCallTokens) {
        const int64_t count = least(kCallTokens, job.last_token - token);
        visit_sums(job, token, count, sums, [&](float* sum, const float* out, int valid, int) MLXR_BODY {
            store_floats(sum, job.first_group > 0 ? load_some(out, valid) : splat(0.0f));
        });
        add_panel_groups<F>(job, token, count, sums);
        visit_sums(job, token, count, sums, [&](const float* sum, float* out, int valid, int row) MLXR_BODY {
            Floats total = load_floats(sum);
            if (job.bias != nullptr) total = add(total, load_some(job.bias + row, valid));
            store_some(out, total, valid);
        });
    }
}

// Takes the zero point from all bytes of a panel.
void sign_panel(uint8_t* at, int64_t units, int groups, int head_bytes, int group_bytes, int zero) {
    const Ints zeros = _mm512_set1_epi8(static_cast<char>(zero));
    for (int64_t unit = 0; unit < units; ++unit) {
        at += head_bytes;
        for (int group = 0; group < groups; ++group, at += group_bytes) {
            repeat<8 * kTileVectors>([&](auto i) MLXR_BODY {
                uint8_t* const word = at + 4 * kLanes * i;
                store_ints(word, _mm512_sub_epi8(load_ints(word), zeros));
            });
        }
    }
}

// Four bytes less the zero point times a scale, in digits: the word's lower ones, in -64..63, and upper ones.
struct Digits {
    Ints lower, upper;
};
MLXR_INLINE Digits scale_word(Ints word, Ints scale, Ints zero) {
    const auto split = [&](Ints shorts) MLXR_BODY {  // of 16 bits
        const Ints product = _mm512_mullo_epi16(_mm512_sub_epi16(shorts, zero), scale);
        const Ints upper = _mm512_srai_epi16(_mm512_add_epi16(product, _mm512_set1_epi16(64)), 7);
        return Digits{_mm512_sub_epi16(product, _mm512_slli_epi16(upper, 7)), upper};
    };
    const auto join = [](Ints even, Ints odd)
                          MLXR_BODY { return bits_or(bits_and(even, 0x00ff00ffu), _mm512_slli_epi16(odd, 8)); };
    const Digits even = split(bits_and(word, 0x00ff00ffu)), odd = split(_mm512_srli_epi16(word, 8));
    return {join(even.lower, odd.lower), join(even.upper, odd.upper)};
}

// A span of panel.h's as one of FinePanel.
template <Form F>
void scale_weights(const uint8_t* from, uint8_t* to, int zero_point) {
    using P = FinePanel<F>;
    memcpy(to, from, P::kHeadBytes);
    from += P::kHeadBytes;
    to += P::kHeadBytes;
    const Ints zero = _mm512_set1_epi16(static_cast<int16_t>(zero_point));
    for (int group = 0; group < mlxr::kSpanGroups; ++group, from += PanelGroup<F>::kBytes) {
        uint8_t* const words = to + group / 2 * P::kPairBytes + group % 2 * 8 * kRowBytes;
        for (int v = 0; v < kTileVectors; ++v) {
            const Ints fine = ints_at(from, PanelGroup<F>::kStep, v);
            const Ints first = bits_or(bits_and(fine, 0xffff0000u), shift_right(fine, 16)),
                       second = bits_or(bits_and(fine, 0xffffu), shift_left(fine, 16));
            repeat<8>([&](auto i) MLXR_BODY {
                const Digits digits = scale_word(ints_at(from, i, v), i < 4 ? first : second, zero);
                uint8_t* const at = words + kRowBytes * i + 4 * kLanes * v;
                store_ints(at, digits.lower);
                if constexpr (P::kDigits == 2) store_ints(at + P::kPairWords * kRowBytes, digits.upper);
            });
        }
    }
}

// Unpacks as avx512 does, and turns that into what tiles multiply, some units at a time while they are in the cache.
template <class W>
void unpack_for_tiles(const UnpackJob& job) {
    constexpr Form F = W::kForm;
    using P = PanelGroup<F>;
    constexpr int kZero = W::kZeroPoint < 0 ? 0 : mlxr::kZeroPoints[W::kZeroPoint < 0 ? 0 : W::kZeroPoint].value;
    constexpr int64_t kUnits = is_fine(F) ? 1 : kBlockGroups / W::kGroups;
    const auto unpack = mlxr_kernels_avx512()->quant[static_cast<int>(W::kType)].unpack;
    alignas(64) uint8_t span[is_fine(F) ? P::kHeadBytes + mlxr::kSpanGroups * P::kBytes : 1];
    UnpackJob own = job;
    for (; own.first_unit < job.last_unit; own.first_unit = own.last_unit) {
        own.last_unit = least(own.first_unit + kUnits, job.last_unit);
        uint8_t* const to = job.panel + (own.first_unit - job.first_unit) * W::kGroups * Panel<F>::kMeanBytes;
        own.panel = is_fine(F) ? span : to;
        unpack(own);
        if constexpr (is_fine(F)) {
            scale_weights<F>(span, to, kZero);
        } else if constexpr (kZero != 0) {
            sign_panel(to, own.last_unit - own.first_unit, W::kGroups, P::kHeadBytes, P::kBytes, kZero);
        }
    }
}

// The kernels of one type; shorts, floats and those with a step for 16 columns keep those of avx512.
template <class W>
void take_tiles(mlxr::KernelTable& table) {
    if constexpr (!std::is_void_v<W>) {
        if constexpr (!is_short(W::kForm) && W::kForm != Form::halved) {
            QuantKernels& kernels = table.quant[static_cast<int>(W::kType)];
            kernels.panel_tokens = kCallTokens;
            kernels.panel_group_bytes = Panel<W::kForm>::kMeanBytes;
            kernels.unpack = unpack_for_tiles<W>;
            kernels.panel = multiply_tokens<W::kForm>;
        }
    }
}

using f32 = void;
using bf16 = void;

// The probe's: four sums in turns, of 16 rows and all 64 columns that tiles have.
constexpr int kProbeSums = 4, kProbeRows = 16;

int32_t multiply_steps(const uint8_t* data, int64_t steps) {
    shape_tiles(kProbeRows, kProbeRows);
    load_tile<kValues>(data, 4 * kLanes);
    load_tile<kWeights>(data + 4 * kLanes * kProbeRows, 4 * kLanes);
    repeat<kProbeSums>([](auto i) MLXR_BODY { clear_tile<i>(); });
    for (int64_t step = 0; step < steps; ++step) {
        repeat<kProbeSums>([](auto i) MLXR_BODY { add_tiles<i, kValues, kWeights>(); });
    }
    alignas(64) int32_t sums[kProbeSums][kLanes * kProbeRows];
    repeat<kProbeSums>([&](auto i) MLXR_BODY { store_tile<i>(sums[i], 4 * kLanes); });
    release_tiles();
    return sums[0][0] ^ sums[1][0] ^ sums[2][0] ^ sums[3][0];
}

mlxr::KernelTable make_table() noexcept {
    mlxr::KernelTable table = *mlxr_kernels_avx512();
    table.name = "amx";
    table.end_panels = release_tiles;
#define TYPE(name, ...) take_tiles<name>(table);
#include "tables/types.def"
    return table;
}

mlxr::ProbeTable make_probe() noexcept {
    mlxr::ProbeTable table = *mlxr_probe_avx512();
    table.multiply = multiply_steps;
    table.multiply_macs = int64_t{kProbeSums} * kProbeRows * kLanes * 4 * kProbeRows;
    return table;
}

}  // namespace

extern "C" const mlxr::KernelTable* mlxr_kernels_amx() noexcept {
    static const mlxr::KernelTable kTable = make_table();
    return &kTable;
}

extern "C" const mlxr::ProbeTable* mlxr_probe_amx() noexcept {
    static const mlxr::ProbeTable kTable = make_probe();
    return &kTable;
}

extern "C" const mlxr::OperatorTable* mlxr_operators_amx() noexcept {
    return mlxr_operators_avx512();
}
