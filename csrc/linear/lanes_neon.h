// 4 lanes: NEON with the dot product of bytes (Armv8.2 dotprod). See lanes.h.
//
// Sums of products of integers are exact, so sdot gives the bits of every other tier; so would smmla (i8mm), which
// wants two rows of eight columns in a register where a block has four rows of four. bfdot and bfmmla are not used:
// they round to odd and in another order than vdpbf16ps, which products of bf16 follow (operators/pairs.inc).
#pragma once

#include <arm_neon.h>

namespace {

constexpr int kLanes = 4;
constexpr bool kSignedWide = true;  // sdot multiplies signed bytes alone

using Ints = int32x4_t;
using Floats = float32x4_t;

MLXR_INLINE uint32x4_t as_unsigned(Ints a) {
    return vreinterpretq_u32_s32(a);
}
MLXR_INLINE Ints as_signed(uint32x4_t a) {
    return vreinterpretq_s32_u32(a);
}
MLXR_INLINE uint8x16_t as_bytes(Ints a) {
    return vreinterpretq_u8_s32(a);
}
MLXR_INLINE Ints from_bytes(uint8x16_t a) {
    return vreinterpretq_s32_u8(a);
}
MLXR_INLINE Ints splat(int32_t a) {
    return vdupq_n_s32(a);
}
MLXR_INLINE Ints load_ints(const void* p) {
    return from_bytes(vld1q_u8(static_cast<const uint8_t*>(p)));
}
MLXR_INLINE void store_ints(void* p, Ints a) {
    vst1q_u8(static_cast<uint8_t*>(p), as_bytes(a));
}
MLXR_INLINE Ints load_u16(const uint8_t* p) {
    return as_signed(vmovl_u16(vreinterpret_u16_u8(vld1_u8(p))));
}
MLXR_INLINE uint8x8_t load_four(const uint8_t* p) {
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return vreinterpret_u8_u32(vdup_n_u32(word));
}
MLXR_INLINE Ints load_u8(const uint8_t* p) {
    return as_signed(vmovl_u16(vget_low_u16(vmovl_u8(load_four(p)))));
}
MLXR_INLINE Ints load_s8(const uint8_t* p) {
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_four(p)))));
}
MLXR_INLINE Ints bits_and(Ints a, Ints b) {
    return vandq_s32(a, b);
}
MLXR_INLINE Ints bits_or(Ints a, Ints b) {
    return vorrq_s32(a, b);
}
MLXR_INLINE Ints bits_xor(Ints a, Ints b) {
    return veorq_s32(a, b);
}
MLXR_INLINE Ints bits_clear(Ints a, Ints mask) {
    return vbicq_s32(a, mask);
}
MLXR_INLINE Ints shift_right(Ints a, int n) {
    return as_signed(vshlq_u32(as_unsigned(a), vdupq_n_s32(-n)));
}
MLXR_INLINE Ints shift_left(Ints a, int n) {
    return vshlq_s32(a, vdupq_n_s32(n));
}
MLXR_INLINE Ints shift_right_signed(Ints a, int n) {
    return vshlq_s32(a, vdupq_n_s32(-n));
}
MLXR_INLINE Ints add(Ints a, Ints b) {
    return vaddq_s32(a, b);
}
MLXR_INLINE Ints mul(Ints a, Ints b) {
    return vmulq_s32(a, b);
}

MLXR_INLINE Floats splat(float a) {
    return vdupq_n_f32(a);
}
MLXR_INLINE Floats load_floats(const float* p) {
    return vld1q_f32(p);
}
MLXR_INLINE void store_floats(float* p, Floats a) {
    vst1q_f32(p, a);
}
__attribute__((noinline)) Floats load_some(const float* p, int valid) {
    float copy[kLanes] = {};
    for (int i = 0; i < kLanes && i < valid; ++i) copy[i] = p[i];
    return load_floats(copy);
}
__attribute__((noinline)) void store_some(float* p, Floats a, int valid) {
    for (int i = 0; i < kLanes && i < valid; ++i) p[i] = a[i];
}
MLXR_INLINE Floats load_f16(const uint8_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}
MLXR_INLINE Floats half_to_floats(Ints bits) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(as_unsigned(bits))));
}
MLXR_INLINE Floats to_floats(Ints a) {
    return vcvtq_f32_s32(a);
}
MLXR_INLINE Ints as_ints(Floats a) {
    return vreinterpretq_s32_f32(a);
}
MLXR_INLINE Floats as_floats(Ints a) {
    return vreinterpretq_f32_s32(a);
}
MLXR_INLINE Floats add(Floats a, Floats b) {
    return vaddq_f32(a, b);
}
MLXR_INLINE Floats mul(Floats a, Floats b) {
    return vmulq_f32(a, b);
}
MLXR_INLINE Floats fma(Floats a, Floats b, Floats c) {
    return vfmaq_f32(c, a, b);
}
MLXR_INLINE Floats fma_negated(Floats a, Floats b, Floats c) {
    return vfmsq_f32(c, a, b);
}  // c - a*b

// Each byte (0..15) replaced by table[byte].
MLXR_INLINE Ints lookup(Ints a, const uint8_t* table) {
    return from_bytes(vqtbl1q_u8(vld1q_u8(table), as_bytes(a)));
}

// All bits or none of each byte. In memory they are one bit, four for each of 16 rows; `part` says which of them.
using Mask = Ints;
MLXR_INLINE Mask load_mask(const uint8_t* p, int part) {
    const uint8x16_t each = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
    return from_bytes(vtstq_u8(vcombine_u8(vdup_n_u8(p[2 * part]), vdup_n_u8(p[2 * part + 1])), each));
}
MLXR_INLINE Ints whole_bytes(Mask mask) {
    return mask;
}
// Bytes q where the mask is set as 2 * zero - q.
template <int Zero>
MLXR_INLINE Ints negate_bytes(Ints q, Mask mask) {
    const uint8x16_t less = vandq_u8(as_bytes(mask), vdupq_n_u8(static_cast<uint8_t>(255 - 2 * Zero)));
    return from_bytes(vsubq_u8(as_bytes(veorq_s32(q, mask)), less));
}

// Products of 16 bits over 2**15, rounded, halves up.
MLXR_INLINE Ints mul_rounded(Ints a, Ints b) {
    return vreinterpretq_s32_s16(vqrdmulhq_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
}

// Numbers of a table.
MLXR_INLINE Ints gather(const uint32_t* table, Ints indices) {
    const uint32_t numbers[] = {table[indices[0]], table[indices[1]], table[indices[2]], table[indices[3]]};
    return load_ints(numbers);
}

// Four bytes of activations, or two of 16 bits, in every lane.
MLXR_INLINE Ints spread(const void* values) {
    int32_t word;
    memcpy(&word, values, sizeof word);
    return splat(word);
}

// Where a sum over weights with a zero point begins: -zero*sum(activations), or 0 when the signed weight
// multiplies.
template <bool Wide>
MLXR_INLINE Ints start_sum(const int32_t* zero) {
    return splat(Wide ? 0 : *zero);
}

// Narrow weights are 0..63, which are signed bytes as they are; wide ones become so by taking their offset of 128.
template <bool Wide>
MLXR_INLINE Ints dot_word(Ints sum, Ints w, Ints a) {
    const uint8x16_t bytes = Wide ? veorq_u8(as_bytes(w), vdupq_n_u8(0x80)) : as_bytes(w);
    return vdotq_s32(sum, vreinterpretq_s8_u8(bytes), vreinterpretq_s8_s32(a));
}
template <bool Wide>
MLXR_INLINE Ints dot_pair(Ints sum, Ints w0, Ints w1, Ints a0, Ints a1) {
    return dot_word<Wide>(dot_word<Wide>(sum, w0, a0), w1, a1);
}

// sum + the products of two pairs of 16-bit integers.
MLXR_INLINE Ints dot_shorts(Ints sum, Ints w, Ints a) {
    const int16x8_t x = vreinterpretq_s16_s32(w), y = vreinterpretq_s16_s32(a);
    return vaddq_s32(sum, vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y)));
}

}  // namespace
