// How each quantised type turns from its unit (linear/layout.h) into what the kernels multiply: for a group
// of 32 columns eight vectors of unsigned bytes, word i of the group holding columns 4i..4i+3 of each lane's
// row, and scales. Element orders are those of the GGUF blocks.
// Forms are told in forms.h. A type is a struct of its name here: its constants, `scales` (once per unit) and
// `weights<J>` (group n*kStride+J of the unit); of 16 bits `shorts` (words 2*pair and 2*pair+1 of a group's sixteen).
#pragma once

#include "linear/forms.h"
#include "linear/grids.h"
#include "linear/layout.h"

namespace {

using mlxr::Type;

// One part (kLanes rows) of a unit.
struct Unit {
    const uint8_t* base;
    int part;
};

MLXR_INLINE Ints word(Unit unit, int index) {
    return load_ints(unit.base + 64 * index + 4 * kLanes * unit.part);
}
// The 16-bit field `index` after `words` words.
MLXR_INLINE Floats half(Unit unit, int words, int index) {
    return load_f16(unit.base + 64 * words + 32 * index + 2 * kLanes * unit.part);
}
MLXR_INLINE Ints half_bits(Unit unit, int words, int index) {
    return load_u16(unit.base + 64 * words + 32 * index + 2 * kLanes * unit.part);
}

// What `scales` fills, for the groups of one unit; only the arrays of the type's form.
struct Scales {
    Floats step[8], shift[8];  // of fine forms one step for all groups
    Floats second[8];          // of halved ones that of the last 16 columns
    Ints fine[8];              // pairs of 16 bits: of a group's second half, and above it of its first
    Ints mins[8];              // pairs of 16 bits, in the order of span_order
    Floats least;
    Ints exponent;  // where an f32 has its own
};

// Bytes `word`, four numbers below 2**8, into the pairs 2*index and 2*index+1 of minimums.
MLXR_INLINE void put_mins(Ints word, int index, Scales& s) {
    s.mins[2 * index] = bits_and(word, 0x00ff00ffu);
    s.mins[2 * index + 1] = bits_and(shift_right(word, 8), 0x00ff00ffu);
}

// Bytes 2*index and 2*index+1 as a pair for `fine`.
MLXR_INLINE Ints pair_bytes(Ints a, int index) {
    const Ints placed = index == 0 ? shift_left(a, 16) : a;
    return bits_or(bits_and(placed, 0x00ff0000u), unsigned_byte(a, 2 * index + 1));
}

constexpr uint32_t kLow6 = 0x3f3f3f3f;
constexpr uint32_t kLow4 = 0x0f0f0f0f;
constexpr uint32_t kLow2 = 0x03030303;

alignas(16) constexpr uint8_t kIq4Table[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                               129, 141, 153, 166, 181, 197, 217, 241};                       // + 128
alignas(16) constexpr uint8_t kMxfp4Table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};  // + 12

constexpr int kNoZero = -1, kZero8 = 0, kZero12 = 1, kZero16 = 2, kZero128 = 3, kZero4Halves = 4, kZero32Halves = 5,
              kZero128Halves = 6, kZero1 = 7, kZero12Halves = 8;

// The constants every type has.
template <Type T, Form F, int ZeroPoint, bool Wide, int Groups, int Stride>
struct TypeOf {
    static constexpr Type kType = T;
    static constexpr Form kForm = F;
    static constexpr int kZeroPoint = ZeroPoint;
    static constexpr bool kWide = Wide;     // bytes may exceed 63
    static constexpr int kGroups = Groups;  // in a unit
    static constexpr int kStride = Stride;  // groups that share an iteration
    static constexpr int kUnitBytes = mlxr::unit_bytes(T);
};

// 16 bytes for 32 elements: low nibbles first.
MLXR_INLINE void unpack_nibbles(Unit unit, int first_word, Ints* w) {
    for (int i = 0; i < 4; ++i) {
        const Ints packed = word(unit, first_word + i);
        w[i] = bits_and(packed, kLow4);
        w[i + 4] = bits_and(shift_right(packed, 4), kLow4);
    }
}

// Bit i of each byte of `bits` is the fifth bit of that byte of word i.
MLXR_INLINE void add_fifth_bits(Ints bits, Ints* w) {
    for (int i = 0; i < 8; ++i) {
        const Ints placed = i < 4 ? shift_left(bits, 4 - i) : shift_right(bits, i - 4);
        w[i] = bits_or(w[i], bits_and(placed, 0x10101010u));
    }
}

MLXR_INLINE void map_bytes(const uint8_t* table, Ints* w) {
    for (int i = 0; i < 8; ++i) w[i] = lookup(w[i], table);
}

struct q4_0 : TypeOf<Type::q4_0, Form::plain, kZero8, false, 1, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) { s.step[0] = half(unit, 4, 0); }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int, Ints* w) {
        unpack_nibbles(unit, 0, w);
    }
};

struct q4_1 : TypeOf<Type::q4_1, Form::shifted, kNoZero, false, 1, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        s.step[0] = half(unit, 4, 0);
        s.shift[0] = mul(half(unit, 4, 1), splat(-1.0f));
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int, Ints* w) {
        unpack_nibbles(unit, 0, w);
    }
};

struct q5_0 : TypeOf<Type::q5_0, Form::plain, kZero16, false, 1, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) { s.step[0] = half(unit, 5, 0); }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int, Ints* w) {
        unpack_nibbles(unit, 0, w);
        add_fifth_bits(word(unit, 4), w);
    }
};

struct q5_1 : TypeOf<Type::q5_1, Form::shifted, kNoZero, false, 1, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        s.step[0] = half(unit, 5, 0);
        s.shift[0] = mul(half(unit, 5, 1), splat(-1.0f));
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int, Ints* w) {
        unpack_nibbles(unit, 0, w);
        add_fifth_bits(word(unit, 4), w);
    }
};

MLXR_INLINE void unpack_signed_bytes(Unit unit, int first_word, Ints* w) {
    const Ints offset = splat(static_cast<int32_t>(0x80808080u));
    for (int i = 0; i < 8; ++i) w[i] = bits_xor(word(unit, first_word + i), offset);
}

struct q8_0 : TypeOf<Type::q8_0, Form::plain, kZero128, true, 1, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) { s.step[0] = half(unit, 8, 0); }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int, Ints* w) {
        unpack_signed_bytes(unit, 0, w);
    }
};

struct q8_k : TypeOf<Type::q8_k, Form::span, kZero128, true, 8, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        for (int g = 0; g < 8; ++g) s.step[g] = as_floats(word(unit, 64));
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        unpack_signed_bytes(unit, 8 * n, w);
    }
};

// 2-bit planes: group n*4+J takes bits 2J of words 8n..8n+7.
template <int J>
MLXR_INLINE void unpack_planes(Unit unit, int n, Ints* w) {
    for (int i = 0; i < 8; ++i) w[i] = bits_and(shift_right(word(unit, 8 * n + i), 2 * J), kLow2);
}

struct q2_k : TypeOf<Type::q2_k, Form::fine_shifted, kNoZero, false, 8, 4> {
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        s.step[0] = half(unit, 20, 0);
        s.least = mul(half(unit, 20, 1), splat(-1.0f));
        for (int i = 0; i < 4; ++i) {
            const Ints bytes = word(unit, 16 + i), scales = bits_and(bytes, kLow4);
            for (int j = 0; j < 2; ++j) s.fine[2 * i + j] = pair_bytes(scales, j);
            put_mins(bits_and(shift_right(bytes, 4), kLow4), i, s);
        }
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        unpack_planes<J>(unit, n, w);
    }
};

struct q3_k : TypeOf<Type::q3_k, Form::fine, kZero4Halves, false, 8, 4> {
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        s.step[0] = half(unit, 27, 0);
        const Ints low0 = word(unit, 24), low1 = word(unit, 25), high = word(unit, 26);
        for (int i = 0; i < 4; ++i) {  // scales 4i..4i+3: 4 bits of the first two words, 2 of the third
            const Ints low = bits_and(shift_right(i % 2 ? low1 : low0, i / 2 * 4), kLow4);
            const Ints six = bits_or(low, shift_left(bits_and(shift_right(high, 2 * i), kLow2), 4));
            for (int j = 0; j < 2; ++j) {  // minus 32 each; biased, so that the lower borrows nothing
                const Ints biased = add(pair_bytes(six, j), splat(-32 * 0x10000 + 0x8000 - 32));
                s.fine[2 * i + j] = bits_xor(biased, splat(0x8000));
            }
        }
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        unpack_planes<J>(unit, n, w);
        for (int i = 0; i < 8; ++i) {
            const Ints mask = shift_right(word(unit, 16 + i), 4 * n + J);
            w[i] = bits_or(w[i], shift_left(bits_and(mask, 0x01010101u), 2));
        }
    }
};

// The 6-bit scales and mins of Q4_K and Q5_K, out of three words.
MLXR_INLINE void unpack_scales_mins(Unit unit, int first_word, Floats d, Floats dmin, Scales& s) {
    const Ints s0 = word(unit, first_word), s1 = word(unit, first_word + 1), s2 = word(unit, first_word + 2);
    const Ints scales[2] = {bits_and(s0, kLow6),
                            bits_or(bits_and(s2, kLow4), bits_and(shift_right(s0, 2), 0x30303030u))};
    const Ints mins[2] = {bits_and(s1, kLow6),
                          bits_or(bits_and(shift_right(s2, 4), kLow4), bits_and(shift_right(s1, 2), 0x30303030u))};
    for (int g = 0; g < 8; ++g) s.step[g] = mul(d, to_floats(unsigned_byte(scales[g / 4], g % 4)));
    for (int i = 0; i < 2; ++i) put_mins(mins[i], i, s);
    s.least = mul(dmin, splat(-1.0f));
}

// Group 2n takes the low nibbles of words 8n..8n+7, group 2n+1 the high ones.
template <int J>
MLXR_INLINE void unpack_nibble_plane(Unit unit, int n, Ints* w) {
    for (int i = 0; i < 8; ++i) w[i] = bits_and(shift_right(word(unit, 8 * n + i), 4 * J), kLow4);
}

struct q4_k : TypeOf<Type::q4_k, Form::span_shifted, kNoZero, false, 8, 2> {
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        unpack_scales_mins(unit, 32, half(unit, 35, 0), half(unit, 35, 1), s);
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        unpack_nibble_plane<J>(unit, n, w);
    }
};

struct q5_k : TypeOf<Type::q5_k, Form::span_shifted, kNoZero, false, 8, 2> {
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        unpack_scales_mins(unit, 40, half(unit, 43, 0), half(unit, 43, 1), s);
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        unpack_nibble_plane<J>(unit, n, w);
        for (int i = 0; i < 8; ++i) {
            const Ints bit = bits_and(shift_right(word(unit, 32 + i), 2 * n + J), 0x01010101u);
            w[i] = bits_or(w[i], shift_left(bit, 4));
        }
    }
};

struct q6_k : TypeOf<Type::q6_k, Form::fine, kZero32Halves, false, 8, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        s.step[0] = half(unit, 52, 0);
        const uint8_t* const scales = unit.base + 64 * 48 + kLanes * unit.part;
        for (int g = 0; g < 8; ++g) {
            const Ints first = load_s8(scales + kBlockRows * 2 * g),
                       second = load_s8(scales + kBlockRows * (2 * g + 1));
            s.fine[g] = bits_or(shift_left(first, 16), bits_and(second, 0xffffu));
        }
    }
    // Six words for eight: the upper two bits of three are the fourth.
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        for (int i = 0; i < 2; ++i) {
            const int first = 6 * n + 3 * i;
            const Ints a = word(unit, first), b = word(unit, first + 1), c = word(unit, first + 2);
            w[4 * i] = bits_and(a, kLow6);
            w[4 * i + 1] = bits_and(b, kLow6);
            w[4 * i + 2] = bits_and(c, kLow6);
            const Ints upper =
                bits_or(bits_and(shift_right(a, 2), 0x30303030u), bits_and(shift_right(b, 4), 0x0c0c0c0cu));
            w[4 * i + 3] = bits_or(upper, bits_and(shift_right(c, 6), kLow2));
        }
    }
};

struct iq4_nl : TypeOf<Type::iq4_nl, Form::plain, kZero128, true, 1, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) { s.step[0] = half(unit, 4, 0); }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int, Ints* w) {
        unpack_nibbles(unit, 0, w);
        map_bytes(kIq4Table, w);
    }
};

struct iq4_xs : TypeOf<Type::iq4_xs, Form::span, kZero128, true, 8, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        const Floats d = half(unit, 33, 0);
        const Ints low = word(unit, 32), high = half_bits(unit, 33, 1);
        for (int g = 0; g < 8; ++g) {
            const Ints low4 = bits_and(shift_right(low, 4 * g), 15u);
            const Ints high2 = bits_and(shift_right(high, 2 * g), 3u);
            const Ints scale = add(bits_or(low4, shift_left(high2, 4)), splat(-32));
            s.step[g] = mul(d, to_floats(scale));
        }
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        unpack_nibbles(unit, 4 * n, w);
        map_bytes(kIq4Table, w);
    }
};

struct mxfp4 : TypeOf<Type::mxfp4, Form::plain, kZero12, false, 1, 1> {
    // 2^(e-128) by its bits: subnormal for e of 0 and 1.
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        const Ints e = load_u8(unit.base + 256 + kLanes * unit.part);
        const Ints below_two = shift_right_signed(add(e, splat(-2)), 31);
        const Ints normal = shift_left(add(e, splat(-1)), 23);
        const Ints subnormal = shift_left(add(e, splat(1)), 21);
        s.step[0] = as_floats(bits_or(bits_clear(normal, below_two), bits_and(subnormal, below_two)));
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int, Ints* w) {
        unpack_nibbles(unit, 0, w);
        map_bytes(kMxfp4Table, w);
    }
};

// Half of E4M3 numbers, as ggml reads them: their signs do not count, and 127 is zero.
MLXR_INLINE Floats halve_e4m3(Ints byte) {
    const Ints none = shift_right_signed(add(bits_xor(byte, splat(127)), splat(-1)), 31);
    const Ints bits = bits_clear(shift_left(bits_and(byte, 127u), 20), none);
    return mul(as_floats(bits), splat(0x1p119f));  // an f32 with the same exponent and fraction is 2**-120 of it
}

// Numbers of E2M1 with a scale for 16 columns, eight bytes of low nibbles before high ones; perhaps a factor for all.
template <Type T, bool HasFactor>
struct FourBits : TypeOf<T, Form::halved, kZero12Halves, false, 2, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        const Ints bytes = word(unit, 8);
        for (int g = 0; g < 2; ++g) {
            s.step[g] = halve_e4m3(unsigned_byte(bytes, 2 * g));
            s.second[g] = halve_e4m3(unsigned_byte(bytes, 2 * g + 1));
            if constexpr (HasFactor) {
                const Floats factor = as_floats(word(unit, 9));
                s.step[g] = mul(s.step[g], factor);
                s.second[g] = mul(s.second[g], factor);
            }
        }
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        for (int i = 0; i < 4; ++i) {
            const Ints packed = word(unit, 4 * n + i);
            w[i / 2 * 4 + i % 2] = bits_and(packed, kLow4);
            w[i / 2 * 4 + i % 2 + 2] = bits_and(shift_right(packed, 4), kLow4);
        }
        map_bytes(kMxfp4Table, w);
    }
};

using nvfp4 = FourBits<Type::nvfp4, false>;
using nvfp4_scaled = FourBits<Type::nvfp4_scaled, true>;

// Whether a type's words are looked up in a grid: its Numbers.
template <class W>
concept has_grid = requires { typename W::Numbers; };

// The mask `index` of those that begin after `words` words.
MLXR_INLINE Mask mask_at(Unit unit, int words, int index) {
    return load_mask(unit.base + 64 * words + 8 * index, unit.part);
}

// Bits [first, first + 3) or [first, first + 4) of a word, times 2, plus 1.
template <int Bits>
MLXR_INLINE Ints odd_number(Ints word, int first) {
    const Ints placed = first == 0 ? shift_left(word, 1) : shift_right(word, first - 1);
    return bits_or(bits_and(placed, (1u << (Bits + 1)) - 2), splat(1));
}

// The steps of eight groups, out of a word.
template <int Bits>
MLXR_INLINE void put_odd_steps(Ints word, Floats d, Scales& s) {
    for (int g = 0; g < 8; ++g) s.step[g] = mul(d, to_floats(odd_number<Bits>(word, 4 * g)));
}

// Scales of sixteen groups of 16 columns, out of two words.
MLXR_INLINE void put_odd_pairs(Ints first, Ints second, Scales& s) {
    for (int g = 0; g < 8; ++g) {
        const Ints word = g < 4 ? first : second;
        const int at = 8 * (g % 4);
        s.fine[g] = bits_or(shift_left(odd_number<4>(word, at), 16), odd_number<4>(word, at + 4));
    }
}

// The signs of group n, whose masks begin after `words` words.
template <int Zero>
MLXR_INLINE void negate_group(Unit unit, int words, int n, Ints* w) {
    for (int i = 0; i < 8; ++i) w[i] = negate_bytes<Zero>(w[i], mask_at(unit, words, 8 * n + i));
}

struct iq3_s : TypeOf<Type::iq3_s, Form::span, kZero16, false, 8, 1> {
    using Numbers = Grid<IQ3_S_GRID, 512, 4, 16, 1, 3, 5, 7, 9, 11, 13, 15>;
    MLXR_INLINE void scales(Unit unit, Scales& s) { put_odd_steps<4>(word(unit, 26), half(unit, 27, 0), s); }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        for (int i = 0; i < 2; ++i) {
            const Mask ninth = mask_at(unit, 16, 2 * n + i);
            look_up_grid<Numbers>(word(unit, 2 * n + i), &ninth, w + 4 * i);
        }
        negate_group<16>(unit, 18, n, w);
    }
};

struct iq3_xxs : TypeOf<Type::iq3_xxs, Form::span, kZero128, true, 8, 1> {
    using Numbers = Grid<IQ3_XXS_GRID, 256, 4, 128, 4, 12, 20, 28, 36, 44, 52, 62>;
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        put_odd_steps<4>(word(unit, 24), mul(half(unit, 25, 0), splat(0.25f)), s);
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        for (int i = 0; i < 2; ++i) look_up_grid<Numbers>(word(unit, 2 * n + i), nullptr, w + 4 * i);
        negate_group<128>(unit, 16, n, w);
    }
};

struct iq2_xxs : TypeOf<Type::iq2_xxs, Form::span, kZero128, true, 8, 1> {
    using Numbers = Grid<IQ2_XXS_GRID, 256, 8, 128, 8, 25, 43>;
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        put_odd_steps<4>(word(unit, 16), mul(half(unit, 17, 0), splat(0.125f)), s);
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        look_up_grid<Numbers>(word(unit, n), nullptr, w);
        negate_group<128>(unit, 8, n, w);
    }
};

struct iq2_xs : TypeOf<Type::iq2_xs, Form::long_fine, kZero128Halves, true, 8, 1> {
    using Numbers = Grid<IQ2_XS_GRID, 512, 8, 128, 8, 25, 43>;
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        s.step[0] = mul(half(unit, 19, 0), splat(0.125f));
        put_odd_pairs(word(unit, 17), word(unit, 18), s);
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        const Mask ninth = mask_at(unit, 8, n);
        look_up_grid<Numbers>(word(unit, n), &ninth, w);
        negate_group<128>(unit, 9, n, w);
    }
};

struct iq2_s : TypeOf<Type::iq2_s, Form::long_fine, kZero128Halves, true, 8, 1> {
    using Numbers = Grid<IQ2_S_GRID, 1024, 8, 128, 8, 25, 43>;
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        s.step[0] = mul(half(unit, 20, 0), splat(0.125f));
        put_odd_pairs(word(unit, 18), word(unit, 19), s);
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        const Mask high[2] = {mask_at(unit, 16, 2 * n), mask_at(unit, 16, 2 * n + 1)};
        look_up_grid<Numbers>(word(unit, n), high, w);
        negate_group<128>(unit, 8, n, w);
    }
};

// Eight times what a grid of -1, 0 and 1 says, less 1; 2 are added where delta is not negative.
template <int Zero>
using Eighths = Grid<IQ1_GRID, 2048, 8, Zero, -9, -1, 7>;

struct iq1_s : TypeOf<Type::iq1_s, Form::span, kZero16, false, 8, 1> {
    using Numbers = Eighths<16>;
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        put_odd_steps<3>(word(unit, 11), mul(half(unit, 12, 0), splat(0.125f)), s);
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        const Mask high[3] = {mask_at(unit, 8, 3 * n), mask_at(unit, 8, 3 * n + 1), mask_at(unit, 8, 3 * n + 2)};
        look_up_grid<Numbers>(word(unit, n), high, w);
        const Ints lower = shift_right_signed(shift_left(word(unit, 11), 28 - 4 * n), 31);
        const Ints two = bits_clear(splat(0x02020202), lower);
        for (int i = 0; i < 8; ++i) w[i] = add(w[i], two);
    }
};

struct iq1_m : TypeOf<Type::iq1_m, Form::fine, kZero32Halves, false, 8, 1> {
    using Numbers = Eighths<32>;
    // Four numbers of 16 bits: three bits for each of four groups, and four of d.
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        const Ints packed[2] = {word(unit, 12), word(unit, 13)};
        Ints d = splat(0);
        for (int i = 0; i < 4; ++i) {
            const Ints four = bits_and(shift_right(packed[i / 2], 12 + 16 * (i % 2)), 15u);
            d = bits_or(d, shift_left(four, 4 * i));
        }
        s.step[0] = mul(half_to_floats(d), splat(0.125f));
        const auto scale = [&](int i)
                               MLXR_BODY { return odd_number<3>(packed[i / 8], 16 * (i / 4 % 2) + 3 * (i % 4)); };
        for (int g = 0; g < 8; ++g) s.fine[g] = bits_or(shift_left(scale(2 * g), 16), scale(2 * g + 1));
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        const Mask high[3] = {mask_at(unit, 8, 4 * n), mask_at(unit, 8, 4 * n + 1), mask_at(unit, 8, 4 * n + 2)};
        look_up_grid<Numbers>(word(unit, n), high, w);
        const Ints all_lower = whole_bytes(mask_at(unit, 8, 4 * n + 3));  // a byte for 8 columns
        for (int j = 0; j < 4; ++j) {
            const Ints lower = shift_right_signed(shift_left(all_lower, 24 - 8 * j), 31);
            const Ints two = bits_clear(splat(0x02020202), lower);
            for (int i = 0; i < 2; ++i) w[2 * j + i] = add(w[2 * j + i], two);
        }
    }
};

MLXR_INLINE void repeat_step(Floats d, Scales& s) {
    for (int g = 0; g < 8; ++g) s.step[g] = d;
}

// Digits of base 3, five to a byte: a byte b has digit `index` on top of what remains of b * 3**index below 256.
MLXR_INLINE Ints digit(Ints bytes, int index) {
    constexpr int kPowers[] = {1, 3, 9, 27, 81};
    const Ints power = splat(kPowers[index]), three = splat(3);
    const auto two = [&](Ints pair) MLXR_BODY {  // of two bytes, 16 bits apart
        const Ints rest = bits_and(mul(bits_and(pair, 0x00ff00ffu), power), 0x00ff00ffu);
        return bits_and(shift_right(mul(rest, three), 8), 0x00ff00ffu);
    };
    return bits_or(two(bytes), shift_left(two(shift_right(bytes, 8)), 8));
}

// Groups 0 to 4 are the digits of words 0 to 7, then 16 columns each those of words 8 to 11; the last 16 are those of
// the last word.
struct tq1_0 : TypeOf<Type::tq1_0, Form::span, kZero1, false, 8, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) { repeat_step(half(unit, 13, 0), s); }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        for (int i = 0; i < 8; ++i) {
            if (n < 5) {
                w[i] = digit(word(unit, i), n);
            } else if (n < 7 || i < 4) {
                w[i] = digit(word(unit, 8 + i % 4), 2 * (n - 5) + i / 4);
            } else {
                w[i] = digit(word(unit, 12), i - 4);
            }
        }
    }
};

struct tq2_0 : TypeOf<Type::tq2_0, Form::span, kZero1, false, 8, 4> {
    MLXR_INLINE void scales(Unit unit, Scales& s) { repeat_step(half(unit, 16, 0), s); }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        unpack_planes<J>(unit, n, w);
    }
};

// Numbers of two bits less one, a scale for all groups; their repacked words hold four words of columns each.
template <Type T, int Groups>
struct Twos : TypeOf<T, Form::plain, kZero1, false, Groups, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) { repeat_step(half(unit, 2 * Groups, 0), s); }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        for (int i = 0; i < 8; ++i) w[i] = bits_and(shift_right(word(unit, 2 * n + i / 4), 2 * (i % 4)), kLow2);
    }
};

using q2_0 = Twos<Type::q2_0, 2>;
using pq2_0 = Twos<Type::pq2_0, 4>;

// Bits that mean -1 and 1: 0 and 2 less one.
struct q1_0 : TypeOf<Type::q1_0, Form::plain, kZero1, false, 4, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) { repeat_step(half(unit, 4, 0), s); }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        const Ints bits = word(unit, n);
        for (int i = 0; i < 8; ++i) {
            w[i] = bits_and(i == 0 ? shift_left(bits, 1) : shift_right(bits, i - 1), 0x02020202u);
        }
    }
};

// As tq1_0, of half as many columns: digits of words 0 to 3, then of words 4 and 5, and the last 8 of 16 bits.
struct ptq1_0 : TypeOf<Type::ptq1_0, Form::plain, kZero1, false, 4, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) { repeat_step(half(unit, 6, 1), s); }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        for (int i = 0; i < 8; ++i) {
            const int four = 8 * n + i, late = four - 20;
            if (late < 0) {
                w[i] = digit(word(unit, four % 4), four / 4);
            } else if (late < 10) {
                w[i] = digit(word(unit, 4 + late % 2), late / 2);
            } else {
                const Ints two = half_bits(unit, 6, 0);
                w[i] = bits_or(digit(two, 2 * (late - 10)), shift_left(digit(two, 2 * (late - 10) + 1), 16));
            }
        }
    }
};

// What MLX calls affine: step * q + bias, one scale for the unit's groups.
template <Type T, int Groups>
struct Affine4 : TypeOf<T, Form::shifted, kNoZero, false, Groups, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        const Floats step = as_floats(word(unit, 4 * Groups)), bias = as_floats(word(unit, 4 * Groups + 1));
        for (int g = 0; g < Groups; ++g) {
            s.step[g] = step;
            s.shift[g] = mul(bias, splat(-1.0f));
        }
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        unpack_nibbles(unit, 4 * n, w);
    }
};

using affine4_32 = Affine4<Type::affine4_32, 1>;
using affine4_64 = Affine4<Type::affine4_64, 2>;

// Bytes as step * (q - 128) + (bias + 128 * step), which is rounded: so it decodes otherwise.
template <Type T, int Groups>
struct Affine8 : TypeOf<T, Form::shifted, kZero128, true, Groups, 1> {
    MLXR_INLINE Floats decoded_shift(Unit unit) { return mul(as_floats(word(unit, 8 * Groups + 1)), splat(-1.0f)); }
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        const Floats step = as_floats(word(unit, 8 * Groups)), bias = as_floats(word(unit, 8 * Groups + 1));
        for (int g = 0; g < Groups; ++g) {
            s.step[g] = step;
            s.shift[g] = fma_negated(splat(128.0f), step, mul(bias, splat(-1.0f)));
        }
    }
    template <int J>
    MLXR_INLINE void weights(Unit unit, int n, Ints* w) {
        for (int i = 0; i < 8; ++i) w[i] = word(unit, 8 * n + i);
    }
};

using affine8_32 = Affine8<Type::affine8_32, 1>;
using affine8_64 = Affine8<Type::affine8_64, 2>;

// f16 as fixed point (layout.h): 16 words for each group, and a byte, the exponent of all four.
struct f16 : TypeOf<Type::f16, Form::shorts, kNoZero, false, 4, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) {
        s.exponent = shift_left(load_u8(unit.base + 64 * 4 * kShortWords + kLanes * unit.part), 23);
    }
    MLXR_INLINE void shorts(Unit unit, int g, int pair, Ints* w) {
        for (int i = 0; i < 2; ++i) w[i] = word(unit, kShortWords * g + 2 * pair + i);
    }
};

alignas(16) constexpr uint8_t kSignedEights[16] = {64,  72,  80,  88,  96,  104, 112, 120, 192,
                                                   184, 176, 168, 160, 152, 144, 136};  // 8 (8 + f), and minus that
alignas(16) constexpr uint8_t kLowPowers[16] = {0, 1, 2, 4, 8, 16, 32, 64, 128, 0, 0, 0, 0, 0, 0, 0};
alignas(16) constexpr uint8_t kHighPowers[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 64};

// E4M3 as fixed point (layout.h): a byte is an exponent e, a sign and a fraction f, and means (8 + f) * 2**(e - 5),
// rounded, or zero with e. Of four columns the second and the third have changed places.
struct f8_e4m3_128 : TypeOf<Type::f8_e4m3_128, Form::scaled_shorts, kNoZero, false, 4, 1> {
    MLXR_INLINE void scales(Unit unit, Scales& s) { s.step[0] = as_floats(word(unit, 32)); }
    MLXR_INLINE void shorts(Unit unit, int g, int pair, Ints* w) {
        constexpr uint32_t kEven = 0x00ff00ff, kOdd = 0xff00ff00;
        const Ints packed = word(unit, 8 * g + pair), exponents = bits_and(shift_right(packed, 4), kLow4);
        const Ints eights = lookup(bits_and(packed, kLow4), kSignedEights);
        const Ints low = lookup(exponents, kLowPowers), high = lookup(exponents, kHighPowers);
        w[0] = mul_rounded(bits_and(shift_left(eights, 8), kOdd),
                           bits_or(bits_and(low, kEven), bits_and(shift_left(high, 8), kOdd)));
        w[1] = mul_rounded(bits_and(eights, kOdd), bits_or(bits_and(shift_right(low, 8), kEven), bits_and(high, kOdd)));
    }
};

}  // namespace
