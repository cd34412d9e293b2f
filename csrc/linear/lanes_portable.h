// 4 lanes in the compilers' own vector notation, for any processor. See lanes.h.
//
// The fused multiply-add uses the machine's where the plain target has one (ARM), and otherwise computes it
// exactly: the product of two f32 is exact in f64; the f64 sum is rounded to odd, after which rounding to f32
// is right (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
// rounding to odd", 2008).
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

constexpr int kLanes = 4;
constexpr bool kSignedWide = false;

typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint32_t Unsigneds __attribute__((vector_size(16)));
typedef int16_t Shorts __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(32)));
typedef int64_t Longs __attribute__((vector_size(32)));
typedef uint64_t UnsignedLongs __attribute__((vector_size(32)));

MLXR_INLINE Ints splat(int32_t a) {
    return Ints{a, a, a, a};
}
MLXR_INLINE Ints load_ints(const void* p) {
    Ints a;
    memcpy(&a, p, sizeof a);
    return a;
}
MLXR_INLINE void store_ints(void* p, Ints a) {
    memcpy(p, &a, sizeof a);
}
MLXR_INLINE Ints load_u16(const uint8_t* p) {
    uint16_t a[4];
    memcpy(a, p, sizeof a);
    return Ints{a[0], a[1], a[2], a[3]};
}
MLXR_INLINE Ints load_u8(const uint8_t* p) {
    return Ints{p[0], p[1], p[2], p[3]};
}
MLXR_INLINE Ints load_s8(const uint8_t* p) {
    const auto* const bytes = reinterpret_cast<const int8_t*>(p);
    return Ints{bytes[0], bytes[1], bytes[2], bytes[3]};
}
MLXR_INLINE Ints bits_and(Ints a, Ints b) {
    return a & b;
}
MLXR_INLINE Ints bits_or(Ints a, Ints b) {
    return a | b;
}
MLXR_INLINE Ints bits_xor(Ints a, Ints b) {
    return a ^ b;
}
MLXR_INLINE Ints bits_clear(Ints a, Ints mask) {
    return a & ~mask;
}
MLXR_INLINE Ints shift_right(Ints a, int n) {
    return (Ints)((Unsigneds)a >> static_cast<uint32_t>(n));
}
MLXR_INLINE Ints shift_left(Ints a, int n) {
    return (Ints)((Unsigneds)a << static_cast<uint32_t>(n));
}
MLXR_INLINE Ints shift_right_signed(Ints a, int n) {
    return a >> n;
}
MLXR_INLINE Ints add(Ints a, Ints b) {
    return (Ints)((Unsigneds)a + (Unsigneds)b);
}
MLXR_INLINE Ints mul(Ints a, Ints b) {
    return (Ints)((Unsigneds)a * (Unsigneds)b);
}

MLXR_INLINE Floats splat(float a) {
    return Floats{a, a, a, a};
}
MLXR_INLINE Floats load_floats(const float* p) {
    Floats a;
    memcpy(&a, p, sizeof a);
    return a;
}
MLXR_INLINE void store_floats(float* p, Floats a) {
    memcpy(p, &a, sizeof a);
}
__attribute__((noinline)) Floats load_some(const float* p, int valid) {
    float copy[kLanes] = {};
    for (int i = 0; i < kLanes && i < valid; ++i) copy[i] = p[i];
    return load_floats(copy);
}
__attribute__((noinline)) void store_some(float* p, Floats a, int valid) {
    for (int i = 0; i < kLanes && i < valid; ++i) p[i] = a[i];
}
MLXR_INLINE Floats to_floats(Ints a) {
    return __builtin_convertvector(a, Floats);
}
MLXR_INLINE Ints as_ints(Floats a) {
    return (Ints)a;
}
MLXR_INLINE Floats as_floats(Ints a) {
    return (Floats)a;
}
MLXR_INLINE Floats add(Floats a, Floats b) {
    return a + b;
}
MLXR_INLINE Floats mul(Floats a, Floats b) {
    return a * b;
}

MLXR_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__FP_FAST_FMAF)
    return Floats{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]), __builtin_fmaf(a[2], b[2], c[2]),
                  __builtin_fmaf(a[3], b[3], c[3])};
#else
    const Doubles product = __builtin_convertvector(a, Doubles) * __builtin_convertvector(b, Doubles);
    const Doubles addend = __builtin_convertvector(c, Doubles);
    Doubles sum = product + addend;
    // sum + error is the exact result (Knuth's two-sum); NaN where the sum is not finite, which compares
    // unequal.
    const Doubles shifted = sum - product;
    const Doubles error = (product - (sum - shifted)) + (addend - shifted);
    // Where the sum was rounded and its last bit is even, take the odd neighbour on the side of the exact
    // result.
    const Longs inexact = (Longs)(error < 0.0) | (Longs)(error > 0.0);
    const Longs even = ((Longs)sum & 1) - 1;
    const Longs away = 1 - 2 * (Longs)((UnsignedLongs)((Longs)error ^ (Longs)sum) >> 63);
    sum = (Doubles)((Longs)sum + (away & inexact & even));
    return __builtin_convertvector(sum, Floats);
#endif
}
MLXR_INLINE Floats fma_negated(Floats a, Floats b, Floats c) {
    return fma(-a, b, c);
}  // c - a*b

// IEEE half to single, exact: the exponent is moved by multiplying, which normalises subnormals.
MLXR_INLINE Floats half_to_floats(Ints half) {
    const Ints sign = shift_left(half & 0x8000, 16);
    const Ints rest = shift_left(half & 0x7fff, 13);
    const Ints special = (rest >= 0x0f800000) & 0x7f800000;  // infinity and NaN keep the largest exponent
    return (Floats)((Ints)((Floats)rest * 0x1p112f) | special | sign);
}
MLXR_INLINE Floats load_f16(const uint8_t* p) {
    return half_to_floats(load_u16(p));
}

// Each byte (0..15) replaced by table[byte].
MLXR_INLINE Ints lookup(Ints a, const uint8_t* table) {
    uint8_t bytes[16];
    memcpy(bytes, &a, sizeof bytes);
    for (int i = 0; i < 16; ++i) bytes[i] = table[bytes[i]];
    return load_ints(bytes);
}

// All bits or none of each byte. In memory they are one bit, four for each of 16 rows; `part` says which of them.
using Mask = Ints;
MLXR_INLINE Mask load_mask(const uint8_t* p, int part) {
    uint16_t bits;
    memcpy(&bits, p + 2 * part, sizeof bits);
    const Ints fours = Ints{bits & 15, bits >> 4 & 15, bits >> 8 & 15, bits >> 12};
    return (Ints)(((Unsigneds)fours * 0x00204081u & 0x01010101u) * 255u);
}
MLXR_INLINE Ints whole_bytes(Mask mask) {
    return mask;
}
// Bytes q where the mask is set as 2 * zero - q.
template <int Zero>
MLXR_INLINE Ints negate_bytes(Ints q, Mask mask) {
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    return (Ints)((Bytes)(q ^ mask) - ((Bytes)mask & static_cast<uint8_t>(255 - 2 * Zero)));
}

// Products of 16 bits over 2**15, rounded, halves up.
MLXR_INLINE Ints mul_rounded(Ints a, Ints b) {
    const auto half = [](Ints x, Ints y) { return shift_right_signed(x * y + 0x4000, 15); };
    const auto even = [](Ints x) { return shift_right_signed(shift_left(x, 16), 16); };
    const Ints low = half(even(a), even(b)), high = half(shift_right_signed(a, 16), shift_right_signed(b, 16));
    return (low & 0xffff) | shift_left(high, 16);
}

// Numbers of a table.
MLXR_INLINE Ints gather(const uint32_t* table, Ints indices) {
    return (Ints)Unsigneds{table[indices[0]], table[indices[1]], table[indices[2]], table[indices[3]]};
}

// Four bytes of activations, or two of 16 bits, in every lane.
MLXR_INLINE Ints spread(const void* values) {
    int32_t word;
    memcpy(&word, values, sizeof word);
    return splat(word);
}

// Where a sum over weights with a zero point begins: -zero*sum(activations).
template <bool Wide>
MLXR_INLINE Ints start_sum(const int32_t* zero) {
    return splat(*zero);
}

// Sums of two neighbouring products. One product of a byte 0..255 and a value -127..127 fits 16 bits, a sum does not.
MLXR_INLINE Ints multiply_shorts(Shorts w, Shorts a) {
#if defined(__SSE2__)
    return (Ints)_mm_madd_epi16((__m128i)w, (__m128i)a);  // every x86-64 has it
#else
    const Ints products = (Ints)(w * a);
    return shift_right_signed(shift_left(products, 16), 16) + shift_right_signed(products, 16);
#endif
}
MLXR_INLINE Ints dot_word(Ints sum, Ints w, Ints a) {
    const Shorts w_even = (Shorts)(w & 0x00ff00ff), w_odd = (Shorts)(shift_right(w, 8) & 0x00ff00ff);
    const Shorts a_even = (Shorts)shift_left(a, 8) >> 8, a_odd = (Shorts)a >> 8;
    return sum + multiply_shorts(w_even, a_even) + multiply_shorts(w_odd, a_odd);
}

template <bool Wide>
MLXR_INLINE Ints dot_pair(Ints sum, Ints w0, Ints w1, Ints a0, Ints a1) {
    return dot_word(dot_word(sum, w0, a0), w1, a1);
}

// sum + the products of two pairs of 16-bit integers.
MLXR_INLINE Ints dot_shorts(Ints sum, Ints w, Ints a) {
#if defined(__SSE2__)
    return sum + (Ints)_mm_madd_epi16((__m128i)w, (__m128i)a);
#else
    const Ints w_even = shift_right_signed(shift_left(w, 16), 16), a_even = shift_right_signed(shift_left(a, 16), 16);
    return sum + w_even * a_even + shift_right_signed(w, 16) * shift_right_signed(a, 16);
#endif
}

}  // namespace
