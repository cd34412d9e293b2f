// Grids (core/grids.h): four indices of each lane to the words of unsigned bytes, zero point + magnitude, that they
// stand for. With 16 lanes the lower eight bits of 64 indices choose among 128 bytes at a time, whose other bits blend
// what was chosen; bytes hold the low bits of four columns, and are taken apart afterwards. Gathering takes several
// times as long. Shorter vectors gather words.
#pragma once

#include "linear/lanes.h"

namespace {

#define GRID(name, count) constexpr uint16_t name[count]
#include "core/grids.h"
#undef GRID

// `Entries` numbers of `Columns` columns (4 or 8) each, and what levels 0, 1, ... mean; `Zero` is added to them.
template <const uint16_t* Numbers, int Entries, int Columns, int Zero, int... Levels>
struct Grid {
    static constexpr int kEntries = Entries, kZero = Zero;
    static constexpr int kWords = Columns / 4;                    // of an entry
    static constexpr int kHighBits = __builtin_ctz(Entries) - 8;  // of an index, beside its byte
    static constexpr int kBits = 32 / (2 * Columns);              // of a column in a number: 4 or 2
    static constexpr uint8_t value(int level) {
        constexpr int kLevels[] = {Levels...};
        return static_cast<uint8_t>(Zero + kLevels[level % static_cast<int>(sizeof...(Levels))]);
    }
    static constexpr int level(int entry, int column) {
        return Numbers[entry] >> (kBits * column) & ((1 << kBits) - 1);
    }
};

#if defined(MLXR_TIER_avx512)

// For each entry two bytes: of eight columns the levels of the first and the last four; of four columns the lower two
// bits of their levels, and the third ones.
template <class G>
struct GridPlanes {
    alignas(64) uint8_t bytes[2][G::kEntries];
    alignas(64) uint8_t values[64];  // by the lowest bits of an index
    constexpr GridPlanes() : bytes{}, values{} {
        for (int entry = 0; entry < G::kEntries; ++entry) {
            for (int column = 0; column < 4 * G::kWords; ++column) {
                const int level = G::level(entry, column), i = column % 4;
                bytes[column / 4][entry] |= static_cast<uint8_t>((level & 3) << (2 * i));
                if (G::kWords == 1) bytes[1][entry] |= static_cast<uint8_t>((level >> 2) << i);
            }
        }
        for (int i = 0; i < 64; ++i) values[i] = G::value(G::kWords == 1 ? i % 8 : i % 4);
    }
};
template <class G>
constexpr GridPlanes<G> kGridPlanes{};

// One of `Entries` bytes from `table` on for each byte of indices; `high` are their ninth bits and those above.
template <int Entries>
MLXR_INLINE Ints choose_bytes(const uint8_t* table, Ints indices, const Mask* high) {
    if constexpr (Entries == 128) {
        return _mm512_permutex2var_epi8(load_ints(table), indices, load_ints(table + 64));
    } else {
        const Ints lower = choose_bytes<Entries / 2>(table, indices, high);
        const Ints upper = choose_bytes<Entries / 2>(table + Entries / 2, indices, high);
        const Mask mask = Entries == 256 ? _mm512_movepi8_mask(indices) : high[__builtin_ctz(Entries) - 9];
        return _mm512_mask_blend_epi8(mask, lower, upper);
    }
}

// Of byte j of each lane the bits from Step * i - Less on to its byte i; bits above are others.
template <int Step, int Less>
MLXR_INLINE Ints take_apart(Ints bytes, int j) {
    uint8_t places[8];
    for (int i = 0; i < 8; ++i) places[i] = static_cast<uint8_t>((i / 4 * 32 + 8 * j + Step * (i % 4) - Less) & 63);
    int64_t all;
    memcpy(&all, places, sizeof all);
    return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(all), bytes);
}

template <class G>
MLXR_INLINE void look_up_inline(Ints indices, const Mask* high, Ints* w) {
    const GridPlanes<G>& planes = kGridPlanes<G>;
    const Ints values = load_ints(planes.values);
    Ints chosen[2];
    for (int i = 0; i < 2; ++i) chosen[i] = choose_bytes<G::kEntries>(planes.bytes[i], indices, high);
    for (int j = 0; j < 4; ++j) {
        if constexpr (G::kWords == 1) {
            const Ints two = take_apart<2, 0>(chosen[0], j), third = take_apart<1, 2>(chosen[1], j);
            const Ints levels = _mm512_ternarylogic_epi32(_mm512_set1_epi8(3), two, third, 0xca);  // the mask chooses
            w[j] = _mm512_permutexvar_epi8(levels, values);
        } else {
            for (int i = 0; i < 2; ++i) w[2 * j + i] = _mm512_permutexvar_epi8(take_apart<2, 0>(chosen[i], j), values);
        }
    }
}

template <class G>
[[gnu::noinline]] void look_up_called(Ints indices, const Mask* high, Ints* w) {
    look_up_inline<G>(indices, high, w);
}

// Large grids take many instructions, and inline in every kernel they take the compiler minutes.
template <class G>
MLXR_INLINE void look_up_grid(Ints indices, const Mask* high, Ints* w) {
    if constexpr (G::kEntries > 256) {
        look_up_called<G>(indices, high, w);
    } else {
        look_up_inline<G>(indices, high, w);
    }
}

#else

template <class G>
struct GridWords {
    uint32_t words[G::kEntries * G::kWords];
    constexpr GridWords() : words{} {
        for (int entry = 0; entry < G::kEntries; ++entry) {
            for (int column = 0; column < 4 * G::kWords; ++column) {
                const uint32_t value = G::value(G::level(entry, column));
                words[entry * G::kWords + column / 4] |= value << (8 * (column % 4));
            }
        }
    }
};
template <class G>
constexpr GridWords<G> kGridWords{};

template <class G>
MLXR_INLINE void look_up_grid(Ints indices, const Mask* high, Ints* w) {
    for (int j = 0; j < 4; ++j) {
        Ints index = unsigned_byte(indices, j);
        for (int b = 0; b < G::kHighBits; ++b) {
            const int up = 8 + b - 8 * j;  // from where byte j begins to where the bit belongs
            const Ints placed = up >= 0 ? shift_left(high[b], up) : shift_right(high[b], -up);
            index = bits_or(index, bits_and(placed, uint32_t{0x100} << b));
        }
        for (int i = 0; i < G::kWords; ++i)
            w[G::kWords * j + i] = gather(kGridWords<G>.words + i, shift_left(index, G::kWords - 1));
    }
}

#endif

}  // namespace
