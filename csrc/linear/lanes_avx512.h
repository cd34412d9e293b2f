// 16 lanes: AVX-512 with VNNI. See lanes.h.
#pragma once

#include <immintrin.h>

namespace {

constexpr int kLanes = 16;
constexpr bool kSignedWide = false;  // 8-bit weights multiply as u8 with offset 128

using Ints = __m512i;
using Floats = __m512;

MLXR_INLINE Ints splat(int32_t a) {
    return _mm512_set1_epi32(a);
}
MLXR_INLINE Ints load_ints(const void* p) {
    return _mm512_loadu_si512(p);
}
MLXR_INLINE void store_ints(void* p, Ints a) {
    _mm512_storeu_si512(p, a);
}
MLXR_INLINE Ints load_u16(const uint8_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
MLXR_INLINE Ints load_u8(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
MLXR_INLINE Ints load_s8(const uint8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
MLXR_INLINE Ints bits_and(Ints a, Ints b) {
    return _mm512_and_si512(a, b);
}
MLXR_INLINE Ints bits_or(Ints a, Ints b) {
    return _mm512_or_si512(a, b);
}
MLXR_INLINE Ints bits_xor(Ints a, Ints b) {
    return _mm512_xor_si512(a, b);
}
MLXR_INLINE Ints bits_clear(Ints a, Ints mask) {
    return _mm512_andnot_si512(mask, a);
}
MLXR_INLINE Ints shift_right(Ints a, int n) {
    return _mm512_srli_epi32(a, static_cast<unsigned>(n));
}
MLXR_INLINE Ints shift_left(Ints a, int n) {
    return _mm512_slli_epi32(a, static_cast<unsigned>(n));
}
MLXR_INLINE Ints shift_right_signed(Ints a, int n) {
    return _mm512_srai_epi32(a, static_cast<unsigned>(n));
}
MLXR_INLINE Ints add(Ints a, Ints b) {
    return _mm512_add_epi32(a, b);
}
MLXR_INLINE Ints mul(Ints a, Ints b) {
    return _mm512_mullo_epi32(a, b);
}

MLXR_INLINE Floats splat(float a) {
    return _mm512_set1_ps(a);
}
MLXR_INLINE Floats load_floats(const float* p) {
    return _mm512_loadu_ps(p);
}
MLXR_INLINE void store_floats(float* p, Floats a) {
    _mm512_storeu_ps(p, a);
}
MLXR_INLINE __mmask16 first_lanes(int valid) {
    return static_cast<__mmask16>(valid >= kLanes ? 0xffff : valid > 0 ? (1 << valid) - 1 : 0);
}
MLXR_INLINE Floats load_some(const float* p, int valid) {
    return _mm512_maskz_loadu_ps(first_lanes(valid), p);
}
MLXR_INLINE void store_some(float* p, Floats a, int valid) {
    _mm512_mask_storeu_ps(p, first_lanes(valid), a);
}
MLXR_INLINE Floats load_f16(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
MLXR_INLINE Floats half_to_floats(Ints bits) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits));
}
MLXR_INLINE Floats to_floats(Ints a) {
    return _mm512_cvtepi32_ps(a);
}
MLXR_INLINE Ints as_ints(Floats a) {
    return _mm512_castps_si512(a);
}
MLXR_INLINE Floats as_floats(Ints a) {
    return _mm512_castsi512_ps(a);
}
MLXR_INLINE Floats add(Floats a, Floats b) {
    return _mm512_add_ps(a, b);
}
MLXR_INLINE Floats mul(Floats a, Floats b) {
    return _mm512_mul_ps(a, b);
}
MLXR_INLINE Floats fma(Floats a, Floats b, Floats c) {
    return _mm512_fmadd_ps(a, b, c);
}
MLXR_INLINE Floats fma_negated(Floats a, Floats b, Floats c) {
    return _mm512_fnmadd_ps(a, b, c);
}  // c - a*b

// Each byte (0..15) replaced by table[byte].
MLXR_INLINE Ints lookup(Ints a, const uint8_t* table) {
    const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(row), a);
}

// Products of 16 bits over 2**15, rounded, halves up.
MLXR_INLINE Ints mul_rounded(Ints a, Ints b) {
    return _mm512_mulhrs_epi16(a, b);
}

// A bit for each byte of a vector. In memory those of 16 rows lie side by side, four bits each; `part` says which of
// them.
using Mask = __mmask64;
MLXR_INLINE Mask load_mask(const uint8_t* p, int) {
    Mask mask;
    memcpy(&mask, p, sizeof mask);
    return mask;
}
MLXR_INLINE Ints whole_bytes(Mask mask) {
    return _mm512_movm_epi8(mask);
}
// Bytes q where the mask is set as 2 * zero - q.
template <int Zero>
MLXR_INLINE Ints negate_bytes(Ints q, Mask mask) {
    return _mm512_mask_sub_epi8(q, mask, _mm512_set1_epi8(static_cast<char>(2 * Zero)), q);
}

// Four bytes of activations, or two of 16 bits, in every lane.
MLXR_INLINE Ints spread(const void* values) {
    int32_t word;
    memcpy(&word, values, sizeof word);
    return _mm512_set1_epi32(word);
}

// Where a sum over weights with a zero point begins: -zero*sum(activations).
template <bool Wide>
MLXR_INLINE Ints start_sum(const int32_t* zero) {
    return _mm512_set1_epi32(*zero);
}

template <bool Wide>
MLXR_INLINE Ints dot_pair(Ints sum, Ints w0, Ints w1, Ints a0, Ints a1) {
    return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum, w0, a0), w1, a1);
}

// sum + the products of two pairs of 16-bit integers.
MLXR_INLINE Ints dot_shorts(Ints sum, Ints w, Ints a) {
    return _mm512_dpwssd_epi32(sum, w, a);
}

// Both with activations that are spread just for this. The instructions can do it; GCC 12 loads them first.
template <bool Wide>
MLXR_INLINE Ints dot_pair_at(Ints sum, Ints w0, Ints w1, const int8_t* values) {
    const auto* const quads = reinterpret_cast<const int8_t (*)[4]>(values);
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w0), "m"(quads[0]));
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w1), "m"(quads[1]));
    return sum;
}
MLXR_INLINE Ints dot_shorts_at(Ints sum, Ints w, const int16_t* values) {
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const int16_t (*)[2]>(values)));
    return sum;
}

}  // namespace
