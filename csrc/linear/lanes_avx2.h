// 8 lanes: AVX2, FMA, F16C. See lanes.h.
#pragma once

#include <immintrin.h>

namespace {

constexpr int kLanes = 8;
constexpr bool kSignedWide = true;  // 8-bit weights multiply with their sign, since u8*s8 pairs overflow 16 bits

using Ints = __m256i;
using Floats = __m256;

MLXR_INLINE Ints splat(int32_t a) {
    return _mm256_set1_epi32(a);
}
MLXR_INLINE Ints load_ints(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
MLXR_INLINE void store_ints(void* p, Ints a) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), a);
}
MLXR_INLINE Ints load_u16(const uint8_t* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
MLXR_INLINE Ints load_u8(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
MLXR_INLINE Ints load_s8(const uint8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
MLXR_INLINE Ints bits_and(Ints a, Ints b) {
    return _mm256_and_si256(a, b);
}
MLXR_INLINE Ints bits_or(Ints a, Ints b) {
    return _mm256_or_si256(a, b);
}
MLXR_INLINE Ints bits_xor(Ints a, Ints b) {
    return _mm256_xor_si256(a, b);
}
MLXR_INLINE Ints bits_clear(Ints a, Ints mask) {
    return _mm256_andnot_si256(mask, a);
}
MLXR_INLINE Ints shift_right(Ints a, int n) {
    return _mm256_srli_epi32(a, n);
}
MLXR_INLINE Ints shift_left(Ints a, int n) {
    return _mm256_slli_epi32(a, n);
}
MLXR_INLINE Ints shift_right_signed(Ints a, int n) {
    return _mm256_srai_epi32(a, n);
}
MLXR_INLINE Ints add(Ints a, Ints b) {
    return _mm256_add_epi32(a, b);
}
MLXR_INLINE Ints mul(Ints a, Ints b) {
    return _mm256_mullo_epi32(a, b);
}

MLXR_INLINE Floats splat(float a) {
    return _mm256_set1_ps(a);
}
MLXR_INLINE Floats load_floats(const float* p) {
    return _mm256_loadu_ps(p);
}
MLXR_INLINE void store_floats(float* p, Floats a) {
    _mm256_storeu_ps(p, a);
}
MLXR_INLINE Ints first_lanes(int valid) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(valid), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
MLXR_INLINE Floats load_some(const float* p, int valid) {
    return _mm256_maskload_ps(p, first_lanes(valid));
}
MLXR_INLINE void store_some(float* p, Floats a, int valid) {
    _mm256_maskstore_ps(p, first_lanes(valid), a);
}
MLXR_INLINE Floats load_f16(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
MLXR_INLINE Floats half_to_floats(Ints bits) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
MLXR_INLINE Floats to_floats(Ints a) {
    return _mm256_cvtepi32_ps(a);
}
MLXR_INLINE Ints as_ints(Floats a) {
    return _mm256_castps_si256(a);
}
MLXR_INLINE Floats as_floats(Ints a) {
    return _mm256_castsi256_ps(a);
}
MLXR_INLINE Floats add(Floats a, Floats b) {
    return _mm256_add_ps(a, b);
}
MLXR_INLINE Floats mul(Floats a, Floats b) {
    return _mm256_mul_ps(a, b);
}
MLXR_INLINE Floats fma(Floats a, Floats b, Floats c) {
    return _mm256_fmadd_ps(a, b, c);
}
MLXR_INLINE Floats fma_negated(Floats a, Floats b, Floats c) {
    return _mm256_fnmadd_ps(a, b, c);
}  // c - a*b

// Each byte (0..15) replaced by table[byte].
MLXR_INLINE Ints lookup(Ints a, const uint8_t* table) {
    const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(row), a);
}

// All bits or none of each byte. In memory they are one bit, four for each of 16 rows; `part` says which of them.
using Mask = __m256i;
MLXR_INLINE Mask load_mask(const uint8_t* p, int part) {
    int32_t bits;
    memcpy(&bits, p + 4 * part, sizeof bits);
    const __m256i places = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3,
                                            3, 3, 3, 3, 3, 3, 3);
    const __m256i each = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
    return _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), places), each), each);
}
MLXR_INLINE Ints whole_bytes(Mask mask) {
    return mask;
}
// Bytes q where the mask is set as 2 * zero - q.
template <int Zero>
MLXR_INLINE Ints negate_bytes(Ints q, Mask mask) {
    const __m256i less = _mm256_and_si256(mask, _mm256_set1_epi8(static_cast<char>(255 - 2 * Zero)));
    return _mm256_sub_epi8(_mm256_xor_si256(q, mask), less);
}

// Products of 16 bits over 2**15, rounded, halves up.
MLXR_INLINE Ints mul_rounded(Ints a, Ints b) {
    return _mm256_mulhrs_epi16(a, b);
}

// Numbers of a table.
MLXR_INLINE Ints gather(const uint32_t* table, Ints indices) {
    return _mm256_i32gather_epi32(reinterpret_cast<const int*>(table), indices, 4);
}

// Four bytes of activations, or two of 16 bits, in every lane.
MLXR_INLINE Ints spread(const void* values) {
    int32_t word;
    memcpy(&word, values, sizeof word);
    return _mm256_set1_epi32(word);
}

// Where a sum over weights with a zero point begins: -zero*sum(activations), or 0 when the signed weight
// multiplies.
template <bool Wide>
MLXR_INLINE Ints start_sum(const int32_t* zero) {
    return Wide ? _mm256_setzero_si256() : _mm256_set1_epi32(*zero);
}

// vpmaddubsw saturates at 16 bits. Narrow weights are 0..63: 63*127*4 = 32004 fits. Wide ones (any byte,
// offset 128) go as |w| * (a with w's sign): 128*127*2 = 32512 fits.
template <bool Wide>
MLXR_INLINE Ints dot_pair(Ints sum, Ints w0, Ints w1, Ints a0, Ints a1) {
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (Wide) {
        const __m256i offset = _mm256_set1_epi8(-128);
        const __m256i s0 = _mm256_xor_si256(w0, offset), s1 = _mm256_xor_si256(w1, offset);
        const __m256i p0 = _mm256_maddubs_epi16(_mm256_abs_epi8(s0), _mm256_sign_epi8(a0, s0));
        const __m256i p1 = _mm256_maddubs_epi16(_mm256_abs_epi8(s1), _mm256_sign_epi8(a1, s1));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(p0, ones));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(p1, ones));
    } else {
        const __m256i p = _mm256_add_epi16(_mm256_maddubs_epi16(w0, a0), _mm256_maddubs_epi16(w1, a1));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(p, ones));
    }
}

// sum + the products of two pairs of 16-bit integers.
MLXR_INLINE Ints dot_shorts(Ints sum, Ints w, Ints a) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(w, a));
}

}  // namespace
