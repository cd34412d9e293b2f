// The words of Metal on the host, over fibers.h: as many as metal.h and the bodies say, so that its own words run here.
// Address spaces are nothing. What lanes hold of a matrix, and the order of its sums, are as in emulated.h.
#include <cmath>
#include <cstdint>

#define MLXR_ON_HOST
#define device
#define constant
#define threadgroup
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
typedef _Float16 half;
struct uint4 {
  uint x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
struct half2 {
  half x, y;
  half2() = default;
  explicit half2(float v) : x(half(v)), y(half(v)) {}
};
inline half2 operator-(half2 a, half2 b) {
  half2 made;
  made.x = a.x - b.x, made.y = a.y - b.y;
  return made;
}
struct ulong2 {
  ulong x, y;
  explicit ulong2(ulong v) : x(v), y(v) {}
};

template <typename T, typename U> inline T as_type(U v) {
  static_assert(sizeof(T) == sizeof(U), "as_type to a type of another size");
  T made;
  memcpy(&made, &v, sizeof(made));
  return made;
}
struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float v) {
    const uint raw = as_type<uint>(v);
    bits = std::isnan(v) ? (raw >> 16 | 0x40) : (raw + 0x7FFF + (raw >> 16 & 1)) >> 16;
  }
  operator float() const { return as_type<float>(uint(bits) << 16); }
};

namespace metal {
template <typename T, int N> struct vec {
  T v[N];
  const T &operator[](int i) const { return v[i]; }
  T &operator[](int i) { return v[i]; }
};
namespace precise {
inline float log(float x) { return std::log(x); }
inline float exp(float x) { return std::exp(x); }
inline float exp2(float x) { return std::exp2(x); }
inline float tanh(float x) { return std::tanh(x); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
} // namespace precise
namespace fast {
inline float divide(float a, float b) { return a / b; }
} // namespace fast
inline float max(float a, float b) { return a > b ? a : b; }
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline uint popcount(uint v) { return __builtin_popcount(v); }

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { emulated::leave(emulated::Wait::THREADS); }
inline void simdgroup_barrier(mem_flags) { emulated::leave(emulated::Wait::LANES); }

template <typename T> inline T find_given(const uint *all, int lane) { return as_type<T>(all[lane * emulated::WORDS]); }
template <typename T> inline const uint *give(T v) {
  const uint own = as_type<uint>(v);
  return emulated::exchange(&own, 1);
}
template <typename T> inline T simd_shuffle(T v, ushort lane) { return find_given<T>(give(v), lane); }
template <typename T> inline T simd_shuffle_xor(T v, ushort mask) {
  return find_given<T>(give(v), emulated::find_lane() ^ mask);
}
inline float simd_sum(float v) {
  float parts[emulated::LANES];
  const uint *all = give(v);
  for (int lane = 0; lane < emulated::LANES; ++lane)
    parts[lane] = find_given<float>(all, lane);
  for (int mask = 16; mask > 0; mask >>= 1) // in the order of a butterfly
    for (int lane = 0; lane < mask; ++lane)
      parts[lane] += parts[lane + mask];
  return parts[0];
}
inline uint simd_max(uint v) {
  const uint *all = give(v);
  for (int lane = 0; lane < emulated::LANES; ++lane)
    v = find_given<uint>(all, lane) > v ? find_given<uint>(all, lane) : v;
  return v;
}
inline uint simd_prefix_exclusive_sum(uint v) {
  const uint *all = give(v);
  uint sum = 0;
  for (int lane = 0; lane < emulated::find_lane(); ++lane)
    sum += find_given<uint>(all, lane);
  return sum;
}
struct simd_vote {
  typedef uint64_t vote_t;
  vote_t v;
  explicit operator vote_t() const { return v; }
};
inline simd_vote simd_ballot(bool vote) {
  const uint *all = give(uint(vote));
  simd_vote votes = {0};
  for (int lane = 0; lane < emulated::LANES; ++lane)
    votes.v |= uint64_t(find_given<uint>(all, lane)) << lane;
  return votes;
}

template <typename T, int COLUMNS, int ROWS = COLUMNS> struct simdgroup_matrix {
  static_assert(COLUMNS == 8 && ROWS == 8, "matrices of a SIMD-group are 8 x 8");
  float v[2]; // lane 4 g + t holds columns 2 t, 2 t + 1 of row g
};
template <typename T, int COLUMNS, int ROWS>
inline simdgroup_matrix<T, COLUMNS, ROWS> make_filled_simdgroup_matrix(T value) {
  return {{float(value), float(value)}};
}
inline ulong find_element(int i, ulong width, bool is_turned) {
  const ulong row = emulated::find_lane() / 4, column = 2 * (emulated::find_lane() % 4) + i;
  return is_turned ? column * width + row : row * width + column;
}
template <typename T>
inline void simdgroup_load(simdgroup_matrix<T, 8, 8> &s, const T *p, ulong width = 8, ulong2 = ulong2(0),
                           bool is_turned = false) {
  for (int i = 0; i < 2; ++i)
    s.v[i] = float(p[find_element(i, width, is_turned)]);
}
template <typename T>
inline void simdgroup_store(simdgroup_matrix<T, 8, 8> s, T *p, ulong width = 8, ulong2 = ulong2(0),
                            bool is_turned = false) {
  for (int i = 0; i < 2; ++i)
    p[find_element(i, width, is_turned)] = T(s.v[i]);
}
template <typename A, typename B>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8> &d, simdgroup_matrix<A, 8, 8> a,
                                          simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<float, 8, 8> c) {
  const uint words[4] = {as_type<uint>(a.v[0]), as_type<uint>(a.v[1]), as_type<uint>(b.v[0]), as_type<uint>(b.v[1])};
  const uint *all = emulated::exchange(words, 4);
  const int row = emulated::find_lane() / 4, column = emulated::find_lane() % 4;
  for (int i = 0; i < 2; ++i) {
    float sum = c.v[i];
    for (int k = 0; k < 8; ++k)
      sum = std::fma(as_type<float>(all[(4 * row + k / 2) * emulated::WORDS + k % 2]),
                     as_type<float>(all[(4 * k + column) * emulated::WORDS + 2 + i]), sum);
    d.v[i] = sum;
  }
}
} // namespace metal

// What a launch took: of the threadgroup's memory, whose variables metal.h puts into a section, and of a thread's stack,
// which holds what a GPU would keep in registers.
extern "C" {
extern char __start_mlxr_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_mlxr_shared[] __attribute__((weak, visibility("hidden")));
int mlxr_shared_bytes() { return int(__stop_mlxr_shared - __start_mlxr_shared); }
int mlxr_stack_bytes() { return int(emulated::deepest); }
}
