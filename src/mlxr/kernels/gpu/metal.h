// The words of a kernel body on Metal. See emulated.h for what each of them means.
#include <metal_stdlib>
#include <metal_simdgroup>
using namespace metal;

#define DEVICE device
#define PRIVATE thread
#define SHARED threadgroup
#define GROUP threadgroup
#define TABLE constant
#define FUNCTION inline
#define UNROLL _Pragma("clang loop unroll(full)")

typedef bfloat16_t bf16;
typedef half f16;

FUNCTION float bits_to_float(uint bits) { return as_type<float>(bits); }
FUNCTION float half_bits_to_float(uint bits) { return float(as_type<half>(ushort(bits))); }
FUNCTION float exp_of(float x) { return precise::exp(x); }
FUNCTION float exp2_of(float x) { return precise::exp2(x); }
FUNCTION float tanh_of(float x) { return precise::tanh(x); }
FUNCTION float rsqrt_of(float x) { return precise::rsqrt(x); }
FUNCTION float max_of(float a, float b) { return max(a, b); }

FUNCTION uint load_u16(const DEVICE uint8_t *p) { return *reinterpret_cast<const DEVICE ushort *>(p); }
FUNCTION uint load_u32(const DEVICE uint8_t *p) { return *reinterpret_cast<const DEVICE uint *>(p); }
FUNCTION void load_words(const DEVICE uint8_t *p, PRIVATE uint *w) {
  const uint4 v = *reinterpret_cast<const DEVICE uint4 *>(p);
  w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
}

template <int N, typename T> FUNCTION void load(const DEVICE T *p, PRIVATE float *out) {
  if (N % 4 == 0) {
    for (int i = 0; i < N; i += 4) {
      const vec<T, 4> v = *reinterpret_cast<const DEVICE vec<T, 4> *>(p + i);
      for (int j = 0; j < 4; ++j)
        out[i + j] = float(v[j]);
    }
  } else {
    for (int i = 0; i < N; ++i)
      out[i] = float(p[i]);
  }
}
template <int N, typename T> FUNCTION void store(DEVICE T *p, PRIVATE const float *values) {
  for (int i = 0; i < N; ++i)
    p[i] = T(values[i]);
}

FUNCTION void load_shared(const GROUP float *p, PRIVATE float *out) {
  for (int i = 0; i < 4; ++i)
    out[i] = p[i];
}

FUNCTION void store_shared(GROUP float *p, PRIVATE const float *v) {
  for (int i = 0; i < 4; ++i)
    p[i] = v[i];
}

FUNCTION float shuffle_xor(float v, uint mask) { return simd_shuffle_xor(v, ushort(mask)); }
FUNCTION float sum_lanes(float v) { return simd_sum(v); }
FUNCTION void barrier() { threadgroup_barrier(mem_flags::mem_threadgroup); }
template <typename T> FUNCTION DEVICE T *writable(const DEVICE T *p) { return const_cast<DEVICE T *>(p); }

template <typename T> FUNCTION uint pack_pair(float a, float b) {
  return uint(as_type<ushort>(T(a))) | uint(as_type<ushort>(T(b))) << 16;
}
template <typename T> FUNCTION float unpack(uint pair, uint index) { return float(as_type<T>(ushort(pair >> 16 * index))); }
template <typename T> FUNCTION void multiply_tile(PRIVATE float *c, PRIVATE const uint *a, PRIVATE const uint *b) {
  const ushort lane = ushort(simd_prefix_exclusive_sum(1)), row = lane / 4, column = lane % 4 * 2;
  for (ushort part = 0; part < 4; ++part) // the columns of a that one lane in four holds
    for (ushort half_k = 0; half_k < 2; ++half_k)
      for (ushort i = 0; i < 4; ++i) {
        const uint left = simd_shuffle(a[half_k * 2 + i / 2], ushort(row * 4 + part));
        const uint right = simd_shuffle(b[half_k], ushort((column + i % 2) * 4 + part));
        c[i] += unpack<T>(left, 0) * unpack<T>(right, 0) + unpack<T>(left, 1) * unpack<T>(right, 1);
      }
}
