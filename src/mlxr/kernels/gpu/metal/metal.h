// The words of a kernel body on Metal. See emulated.h for what each of them means.
#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;

#define DEVICE device
#define PRIVATE thread
#define SHARED alignas(16) threadgroup
#define GROUP threadgroup
#define TABLE constant
#define FUNCTION inline
#define UNROLL _Pragma("clang loop unroll(full)")
#define ROLLED

typedef bfloat16_t bf16;
typedef half f16;
typedef uint Offset; // no weight takes 4 GiB (parts.py), and products of 64 bits take ten times as long

FUNCTION float bits_to_float(uint bits) { return as_type<float>(bits); }
FUNCTION uint float_to_bits(float v) { return as_type<uint>(v); }
FUNCTION float half_bits_to_float(uint bits) { return float(as_type<half>(ushort(bits))); }
// Four bytes as numbers: halves of 1024 and more have steps of 1.
#define HAS_HALVES
FUNCTION void place_halves(uint word, PRIVATE float *f) {
  const half2 even = as_type<half2>((word & 0x00FF00FFu) | 0x64006400u) - half2(1024.0f);
  const half2 odd = as_type<half2>((word >> 8 & 0x00FF00FFu) | 0x64006400u) - half2(1024.0f);
  f[0] = float(even.x), f[1] = float(odd.x), f[2] = float(even.y), f[3] = float(odd.y);
}
FUNCTION float log_of(float x) { return precise::log(x); }
FUNCTION float exp_of(float x) { return precise::exp(x); }
FUNCTION float exp2_of(float x) { return precise::exp2(x); }
FUNCTION float tanh_of(float x) { return precise::tanh(x); }
FUNCTION float rsqrt_of(float x) { return precise::rsqrt(x); }
FUNCTION float max_of(float a, float b) { return max(a, b); }
FUNCTION float quotient_of(float a, float b) { return b > 8.5e37f ? 0.0f : fast::divide(a, b); }

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
#ifndef MLXR_ON_HOST // where there are no address spaces
// Of an array with fewer than eight numbers, which MLX puts into constant memory.
template <int N, typename T> FUNCTION void load(const constant T *p, PRIVATE float *out) {
  for (int i = 0; i < N; ++i)
    out[i] = float(p[i]);
}
#endif
template <int N, typename T> FUNCTION void store(DEVICE T *p, PRIVATE const float *values) {
  if (N % 4 == 0) {
    for (int i = 0; i < N; i += 4) {
      vec<T, 4> v;
      for (int j = 0; j < 4; ++j)
        v[j] = T(values[i + j]);
      *reinterpret_cast<DEVICE vec<T, 4> *>(p + i) = v;
    }
  } else {
    for (int i = 0; i < N; ++i)
      p[i] = T(values[i]);
  }
}

FUNCTION void load_shared(const GROUP float *p, PRIVATE float *out) {
  const float4 v = *reinterpret_cast<const GROUP float4 *>(p);
  out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
}
FUNCTION void store_shared(GROUP float *p, PRIVATE const float *v) {
  float4 made;
  made.x = v[0], made.y = v[1], made.z = v[2], made.w = v[3];
  *reinterpret_cast<GROUP float4 *>(p) = made;
}
FUNCTION void read_words(const GROUP uint *p, PRIVATE uint *w) {
  const uint4 v = *reinterpret_cast<const GROUP uint4 *>(p);
  w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
}
FUNCTION void store_words(GROUP uint *p, PRIVATE const uint *w) {
  uint4 made;
  made.x = w[0], made.y = w[1], made.z = w[2], made.w = w[3];
  *reinterpret_cast<GROUP uint4 *>(p) = made;
}

FUNCTION float shuffle_xor(float v, uint mask) { return simd_shuffle_xor(v, ushort(mask)); }
FUNCTION float sum_lanes(float v) { return simd_sum(v); }
FUNCTION uint vote_lanes(bool v) { return uint(simd_vote::vote_t(simd_ballot(v))); }
FUNCTION int count_bits(uint v) { return int(popcount(v)); }
FUNCTION uint largest_of_lanes(uint v) { return simd_max(v); }
FUNCTION void barrier() { threadgroup_barrier(mem_flags::mem_threadgroup); }
FUNCTION void simd_barrier() { simdgroup_barrier(mem_flags::mem_threadgroup); }
template <typename T> FUNCTION DEVICE T *writable(const DEVICE T *p) { return const_cast<DEVICE T *>(p); }

FUNCTION void copy_words(const DEVICE uint8_t *from, GROUP uint *to) {
  *reinterpret_cast<GROUP uint4 *>(to) = *reinterpret_cast<const DEVICE uint4 *>(from);
}
FUNCTION void stream_words(const DEVICE uint8_t *from, GROUP uint *to) { copy_words(from, to); }
FUNCTION void copy_word(const DEVICE uint8_t *from, GROUP uint *to) {
  *to = *reinterpret_cast<const DEVICE uint *>(from);
}
FUNCTION void expect_line(const DEVICE uint8_t *) {}
FUNCTION void seal_copies() {}
template <int N> FUNCTION void await_copies() {}

FUNCTION void await_inputs() {}

#define ROOM(name, WORDS) SHARED uint name[WORDS]

template <typename T = bf16> FUNCTION uint pack_pair(float low, float high) {
  return uint(as_type<ushort>(T(low))) | uint(as_type<ushort>(T(high))) << 16;
}
FUNCTION float low_of(uint pair) { return as_type<float>(pair << 16); }
FUNCTION float high_of(uint pair) { return as_type<float>(pair & 0xFFFF0000u); }
FUNCTION uint widen_bytes(uint word, int which) {
  word >>= 16 * which;
  return (word & 0xFFu) | (word & 0xFF00u) << 8 | 0x43004300u;
}
FUNCTION uint widen_byte(uint word, int which) { return (word >> (8 * which) & 0xFFu) * 0x10001u | 0x43004300u; }
FUNCTION uint pick_bytes(uint a, uint b, uint which) {
  uint picked = 0u;
  for (uint i = 0u; i < 4u; ++i) {
    const uint at = which >> (4u * i) & 7u;
    picked |= ((at < 4u ? a : b) >> (8u * (at & 3u)) & 0xFFu) << (8u * i);
  }
  return picked;
}
template <int WHICH> FUNCTION uint join_bytes(uint a, uint b, uint c, uint d) {
  return (a >> 8 * WHICH & 0xFFu) | (b >> 8 * WHICH & 0xFFu) << 8 | (c >> 8 * WHICH & 0xFFu) << 16 |
         (d >> 8 * WHICH & 0xFFu) << 24;
}
FUNCTION uint multiply_pairs(uint a, uint b, uint c) {
  return pack_pair(fma(low_of(a), low_of(b), low_of(c)), fma(high_of(a), high_of(b), high_of(c)));
}
template <typename T> FUNCTION void load_pairs(const DEVICE T *p, PRIVATE uint *out) {
  float v[8];
  load<8>(p, v);
  for (int i = 0; i < 4; ++i)
    out[i] = pack_pair(v[2 * i], v[2 * i + 1]);
}

FUNCTION ushort find_lane() { return ushort(simd_prefix_exclusive_sum(1u)); }
// What two words add to a sum: two 16-bit numbers each, or four bytes.
template <typename T> struct Halves {
  static float multiply(uint a, uint b) {
    return float(as_type<T>(ushort(a))) * float(as_type<T>(ushort(b))) +
           float(as_type<T>(ushort(a >> 16))) * float(as_type<T>(ushort(b >> 16)));
  }
};
template <typename A> struct Bytes4 {
  static int multiply(uint a, uint b) {
    return int(A(a)) * int(char(b)) + int(A(a >> 8)) * int(char(b >> 8)) + int(A(a >> 16)) * int(char(b >> 16)) +
           int(A(a >> 24)) * int(char(b >> 24));
  }
};
// What a lane of a simdgroup_matrix holds is not documented, so the tile is multiplied lane by lane.
template <typename Words, typename Sum>
FUNCTION void multiply_by_lanes(PRIVATE Sum *sums, PRIVATE const uint *a, PRIVATE const uint *b) {
  const ushort lane = find_lane(), row = lane / 4 * 4, column = lane % 4 * 8;
  for (ushort other = 0; other < 4; ++other)
    for (ushort j = 0; j < 2; ++j) {
      const uint near = simd_shuffle(a[2 * j], row + other), far = simd_shuffle(a[2 * j + 1], row + other);
      for (ushort i = 0; i < 2; ++i) {
        const uint x = simd_shuffle(b[j], column + 4 * i + other);
        sums[i] += Words::multiply(near, x);
        sums[2 + i] += Words::multiply(far, x);
      }
    }
}
template <typename T = bf16>
FUNCTION void multiply_tile(PRIVATE float *sums, PRIVATE const uint *a, PRIVATE const uint *b) {
  multiply_by_lanes<Halves<T>>(sums, a, b);
}
FUNCTION void multiply_bytes(PRIVATE int *sums, PRIVATE const uint *a, PRIVATE const uint *b) {
  multiply_by_lanes<Bytes4<uchar>>(sums, a, b);
}
FUNCTION void multiply_signed_bytes(PRIVATE int *sums, PRIVATE const uint *a, PRIVATE const uint *b) {
  multiply_by_lanes<Bytes4<char>>(sums, a, b);
}
FUNCTION int dot_bytes(uint a, uint b) { return Bytes4<char>::multiply(a, b); }

FUNCTION void read_tiles(const GROUP uint *row, PRIVATE uint *w) {
  const ushort lane = find_lane();
  for (ushort i = 0; i < 4; ++i)
    for (ushort j = 0; j < 4; ++j) {
      const uint word = simd_shuffle(row[j], ushort(8 * i + lane / 4));
      w[i] = j == lane % 4 ? word : w[i];
    }
}
// Of two words in one column, the halves `odd`, the first in the lower half.
FUNCTION uint join_halves(uint above, uint below, bool odd) {
  return odd ? above >> 16 | (below & 0xFFFF0000u) : (above & 0xFFFFu) | below << 16;
}
FUNCTION void read_turned_tiles(const GROUP uint *row, PRIVATE uint *w) {
  const ushort lane = find_lane(), column = lane / 4;
  for (ushort i = 0; i < 4; ++i)
    for (ushort j = 0; j < 4; ++j) {
      const ushort from = ushort(8 * i + 2 * (lane % 4));
      const uint above = simd_shuffle(row[j], from), below = simd_shuffle(row[j], ushort(from + 1));
      w[i] = j == column / 2 ? join_halves(above, below, column % 2) : w[i];
    }
}
FUNCTION uint turn_tile(uint pair) {
  const ushort lane = find_lane(), column = lane / 4, from = ushort(lane % 4 * 8 + column / 2);
  return join_halves(simd_shuffle(pair, from), simd_shuffle(pair, ushort(from + 4)), column % 2);
}

// Matrices of 8 x 8; which elements of it a lane holds is not documented.
template <typename T> using Square = simdgroup_matrix<T, 8, 8>;
FUNCTION void clear_square(PRIVATE Square<float> &s) { s = make_filled_simdgroup_matrix<float, 8, 8>(0.0f); }
template <typename T> FUNCTION void read_square(const GROUP T *p, PRIVATE Square<T> &s) { simdgroup_load(s, p, 8); }
FUNCTION void read_wide_square(const GROUP float *p, int width, PRIVATE Square<float> &s) {
  simdgroup_load(s, p, width);
}
template <typename T> FUNCTION void read_turned_square(const GROUP T *p, PRIVATE Square<T> &s) {
  simdgroup_load(s, p, 8, ulong2(0), true);
}
FUNCTION void write_square(GROUP float *p, int width, PRIVATE const Square<float> &s) { simdgroup_store(s, p, width); }
FUNCTION void write_turned_square(GROUP float *p, int width, PRIVATE const Square<float> &s) {
  simdgroup_store(s, p, width, ulong2(0), true);
}
template <typename A, typename B>
FUNCTION void multiply_square(PRIVATE Square<float> &sums, PRIVATE const Square<A> &a, PRIVATE const Square<B> &b) {
  simdgroup_multiply_accumulate(sums, a, b, sums);
}
