// The words of a kernel body, and what each of them means, on every target; below, on the host, where every thread of a
// threadgroup is a fiber (fibers.h). Kernels with boxed inputs have those of rings too (rings.h).
//
//   DEVICE, GROUP, PRIVATE    where a pointer points: device memory, the threadgroup's, the thread's own
//   SHARED                declares memory of the threadgroup; it holds rubbish at first
//   TABLE, FUNCTION       a constant at file scope, a helper
//   group_x, group_y, group_z, thread_id, simd_id, lane_id    where the thread stands; 32 lanes to a SIMD-group
//   THREADS               threads in a threadgroup
//   load<N>, store<N>     N neighbours at once, as floats; the address is a multiple of N elements, or of 16 bytes
//   load_shared, store_shared    four neighbours in the threadgroup's memory
//   read_words, store_words      the same of words
//   power_of_two          exp2_of to two units in the last place; 0 below 2^-126; on CUDA alone
//   quotient_of           a / b, to two or three units in the last place, for b up to 2^126; 0 beyond
//   load_u16, load_u32    little-endian words of raw blocks; the address is a multiple of 2, of 4
//   load_words            four words at once; the address is a multiple of 16
//   UNROLL                before a loop whose index picks array elements, so that they can be registers
//   ROLLED                before a loop that is not to be copied, so that it begins soon
//   shuffle_xor, sum_lanes, barrier    called by all lanes of a SIMD-group, by all threads of a threadgroup
//   vote_lanes            a word of a bit for each lane of a SIMD-group, of which all call it; count_bits: of a word
//   largest_of_lanes      the largest word that a lane of a SIMD-group has; all call it
//   simd_barrier          orders what the lanes of a SIMD-group do in the threadgroup's memory
//   ROOM                  declares words of the threadgroup's memory as `room_bytes` of the launch gives them, once
//   copy_words            begins to bring four words into the threadgroup's memory; addresses are multiples of 16
//   stream_words          the same of what lies beside other words that are read soon, and all of them once
//   copy_word             the same of one word
//   expect_line           brings 128 bytes into a cache that all threadgroups share, if there is one, to be read later
//   seal_copies           makes a bundle of the lane's copies since the last one
//   await_copies<N>       until all of the lane's bundles but the last N are there; here none comes earlier
//   await_inputs          before reading what other launches write, where a kernel says so: until then it may run
//                         beside the launch in front of it, as far as that is recorded
//   pack_pair<T>          two floats as bf16, or as T, in one word, the first in the lower half
//   low_of, high_of       the two of a pair of bf16
//   widen_bytes           two neighbouring bytes below 128 of a word, as the pair 128 + byte
//   widen_byte            one byte below 128 of a word, as the same twice
//   join_bytes<N>         byte N of each of four words, in one word
//   pick_bytes            the bytes of a, then those of b, that the lowest four nibbles name, each below 8
//   multiply_pairs        a * b + c of each half
//   load_pairs            eight neighbours of any type as four pairs of bf16; the address is a multiple of 16 bytes
//   multiply_tile<T>      sums += a b on the matrix units, by all lanes of a SIMD-group: a is 16 x 16, b 16 x 8, and
//                         lane 4 g + t holds of a the columns 2 t, 2 t + 1 of rows g and g + 8, then columns 2 t + 8,
//                         2 t + 9 of both, of b the same rows of column g, of sums columns 2 t, 2 t + 1 of g and g + 8;
//                         of bf16, or of T
//   multiply_bytes        sums += a b in integers: a is 16 x 32 without signs, b 32 x 8 with signs; lane 4 g + t holds
//                         of a the columns 4 t to 4 t + 3 of rows g and g + 8, then columns 16 + 4 t to 19 + 4 t of
//                         both, of b the same rows of column g; multiply_signed_bytes takes an a with signs
//   dot_bytes             the sum of four products of bytes with signs
//   read_tiles            four tiles of 8 x 8 16-bit numbers from the threadgroup's memory: lane 8 i + r says where
//                         row r of tile i lies, and lane 4 g + t gets of each tile the columns 2 t, 2 t + 1 of row g
//   read_turned_tiles     the same, but rows 2 t, 2 t + 1 of column g
//   turn_tile             one tile that the lanes hold by rows, by columns
//   Square<T>             a matrix of 8 x 8 that the lanes of a SIMD-group hold together, all of which call its words;
//                         on Metal alone: clear_square; read_square and read_turned_square of 64 neighbours in the
//                         threadgroup's memory, by rows or by columns; read_wide_square, write_square and
//                         write_turned_square, each row or column `width` behind the one before; multiply_square:
//                         sums += a b, in f32
//   Offset                counts bytes or blocks of a weight
//   writable              a page pool, which MLX knows as an input, to be written in place
#include <cmath>
#include <cstdint>

#define DEVICE
#define PRIVATE
#define SHARED alignas(16) static
#define GROUP
#define TABLE static const
#define FUNCTION inline
#define UNROLL
#define ROLLED

typedef unsigned int uint;
typedef uint64_t Offset;

FUNCTION float bits_to_float(uint bits) {
  float v;
  memcpy(&v, &bits, 4);
  return v;
}
FUNCTION uint float_to_bits(float v) {
  uint bits;
  memcpy(&bits, &v, 4);
  return bits;
}

struct bf16 {
  uint16_t bits;
  bf16() = default;
  explicit bf16(float v) {
    const uint raw = float_to_bits(v);
    bits = std::isnan(v) ? (raw >> 16 | 0x40) : (raw + 0x7FFF + (raw >> 16 & 1)) >> 16;
  }
  operator float() const { return bits_to_float(uint(bits) << 16); }
};

struct f16 {
  uint16_t bits;
  f16() = default;
  explicit f16(float v) {
    const _Float16 narrow = _Float16(v);
    memcpy(&bits, &narrow, 2);
  }
  operator float() const {
    _Float16 narrow;
    memcpy(&narrow, &bits, 2);
    return float(narrow);
  }
};

FUNCTION float half_bits_to_float(uint bits) {
  f16 v;
  v.bits = uint16_t(bits);
  return float(v);
}
FUNCTION float log_of(float x) { return std::log(x); }
FUNCTION float exp_of(float x) { return std::exp(x); }
FUNCTION float exp2_of(float x) { return std::exp2(x); }
FUNCTION float power_of_two(float x) { return std::exp2(x); }
FUNCTION float tanh_of(float x) { return std::tanh(x); }
FUNCTION float rsqrt_of(float x) { return 1.0f / std::sqrt(x); }
FUNCTION float max_of(float a, float b) { return a > b ? a : b; }
FUNCTION float quotient_of(float a, float b) { return a / b; }

// An address that has to be a multiple of so many bytes, or of 16.
template <typename T> FUNCTION T *aligned(T *p, size_t bytes) {
#if defined(MLXR_MAIN)
  const size_t most = 16;
#else
  const size_t most = 8; // MLX on the CPU aligns its arrays no further
#endif
  if (reinterpret_cast<uintptr_t>(p) % (bytes < most ? bytes : most))
    emulated::fail("a load or store is not aligned");
  return p;
}
FUNCTION uint load_u16(const uint8_t *p) {
  aligned(p, 2);
  return p[0] | p[1] << 8;
}
FUNCTION uint load_u32(const uint8_t *p) {
  aligned(p, 4);
  return p[0] | p[1] << 8 | p[2] << 16 | uint(p[3]) << 24;
}
FUNCTION void load_words(const uint8_t *p, uint *w) { memcpy(w, aligned(p, 16), 16); }
template <int N, typename T> FUNCTION void load(const T *p, float *out) {
  aligned(p, N * sizeof(T));
  for (int i = 0; i < N; ++i)
    out[i] = float(p[i]);
}
template <int N, typename T> FUNCTION void store(T *p, const float *values) {
  aligned(p, N * sizeof(T));
  for (int i = 0; i < N; ++i)
    p[i] = T(values[i]);
}
FUNCTION void load_shared(const float *p, float *out) { memcpy(out, aligned(p, 16), 16); }
FUNCTION void store_shared(float *p, const float *v) { memcpy(aligned(p, 16), v, 16); }
FUNCTION void read_words(const uint *p, uint *w) { memcpy(w, aligned(p, 16), 16); }
FUNCTION void store_words(uint *p, const uint *w) { memcpy(aligned(p, 16), w, 16); }

FUNCTION float shuffle_xor(float v, uint mask) {
  const uint bits = float_to_bits(v);
  return bits_to_float(emulated::exchange(&bits, 1)[(emulated::find_lane() ^ mask) * emulated::WORDS]);
}
FUNCTION float sum_lanes(float v) {
  float parts[emulated::LANES];
  const uint bits = float_to_bits(v), *all = emulated::exchange(&bits, 1);
  for (int lane = 0; lane < emulated::LANES; ++lane)
    parts[lane] = bits_to_float(all[lane * emulated::WORDS]);
  for (int mask = 16; mask > 0; mask >>= 1) // in the order of a butterfly
    for (int lane = 0; lane < mask; ++lane)
      parts[lane] += parts[lane + mask];
  return parts[0];
}
FUNCTION uint vote_lanes(bool v) {
  const uint own = v, *all = emulated::exchange(&own, 1);
  uint votes = 0;
  for (int lane = 0; lane < emulated::LANES; ++lane)
    votes |= all[lane * emulated::WORDS] << lane;
  return votes;
}
FUNCTION int count_bits(uint v) { return __builtin_popcount(v); }
FUNCTION uint largest_of_lanes(uint v) {
  const uint *all = emulated::exchange(&v, 1);
  for (int lane = 0; lane < emulated::LANES; ++lane)
    v = all[lane * emulated::WORDS] > v ? all[lane * emulated::WORDS] : v;
  return v;
}
FUNCTION void barrier() { emulated::leave(emulated::Wait::THREADS); }
FUNCTION void simd_barrier() { emulated::leave(emulated::Wait::LANES); }
template <typename T> FUNCTION T *writable(const T *p) { return const_cast<T *>(p); }

template <int BYTES> FUNCTION void copy_bytes(const uint8_t *from, uint *to) {
  memset(aligned(to, BYTES), 0xFF, BYTES); // not a number, for who reads too early
  emulated::group.running->copies.push_back({aligned(from, BYTES), to, BYTES, emulated::group.running->bundles});
}
FUNCTION void copy_words(const uint8_t *from, uint *to) { copy_bytes<16>(from, to); }
FUNCTION void stream_words(const uint8_t *from, uint *to) { copy_bytes<16>(from, to); }
FUNCTION void copy_word(const uint8_t *from, uint *to) { copy_bytes<4>(from, to); }
FUNCTION void expect_line(const uint8_t *from) { *static_cast<const volatile uint8_t *>(from); }
FUNCTION void seal_copies() { ++emulated::group.running->bundles; }
template <int N> FUNCTION void await_copies() {
  emulated::Fiber *self = emulated::group.running;
  std::vector<emulated::Copy> later;
  for (const emulated::Copy &copy : self->copies)
    if (copy.bundle < self->bundles - N)
      memcpy(copy.to, copy.from, copy.bytes);
    else
      later.push_back(copy);
  self->copies = later;
}

FUNCTION void await_inputs() {}

#define ROOM(name, WORDS) SHARED uint name[WORDS]

template <typename T = bf16> FUNCTION uint pack_pair(float low, float high) {
  return T(low).bits | uint(T(high).bits) << 16;
}
FUNCTION float low_of(uint pair) { return bits_to_float(pair << 16); }
FUNCTION float high_of(uint pair) { return bits_to_float(pair & 0xFFFF0000u); }
FUNCTION uint widen_bytes(uint word, int which) {
  word >>= 16 * which;
  return (word & 0xFFu) | (word & 0xFF00u) << 8 | 0x43004300u;
}
FUNCTION uint widen_byte(uint word, int which) { return (word >> (8 * which) & 0xFFu) * 0x10001u | 0x43004300u; }
template <int WHICH> FUNCTION uint join_bytes(uint a, uint b, uint c, uint d) {
  return (a >> 8 * WHICH & 0xFFu) | (b >> 8 * WHICH & 0xFFu) << 8 | (c >> 8 * WHICH & 0xFFu) << 16 |
         (d >> 8 * WHICH & 0xFFu) << 24;
}
FUNCTION uint pick_bytes(uint a, uint b, uint which) {
  const uint64_t all = a | uint64_t(b) << 32;
  uint picked = 0u;
  for (int i = 0; i < 4; ++i)
    picked |= uint(all >> 8 * (which >> 4 * i & 7u) & 0xFFu) << 8 * i;
  return picked;
}
FUNCTION uint multiply_pairs(uint a, uint b, uint c) {
  const double low = double(low_of(a)) * low_of(b) + low_of(c), high = double(high_of(a)) * high_of(b) + high_of(c);
  return pack_pair(float(low), float(high));
}
template <typename T> FUNCTION void load_pairs(const T *p, uint *out) {
  aligned(p, 16);
  for (int i = 0; i < 4; ++i)
    out[i] = pack_pair(float(p[2 * i]), float(p[2 * i + 1]));
}
template <typename T> FUNCTION float half_of(uint pair, int which) {
  T v;
  v.bits = uint16_t(pair >> 16 * which);
  return float(v);
}
template <typename A> FUNCTION int dot_any_bytes(uint a, uint b) {
  int sum = 0;
  for (int shift = 0; shift < 32; shift += 8)
    sum += int(A(a >> shift)) * int(int8_t(b >> shift));
  return sum;
}

namespace emulated {
// sums += a b, where `add` adds to a sum what two words make: of two 16-bit numbers each, or of four bytes.
template <typename Sum, typename Add> void multiply_by_lanes(Sum *sums, const uint *a, const uint *b, Add add) {
  const uint words[WORDS] = {a[0], a[1], a[2], a[3], b[0], b[1]}, *all = exchange(words, WORDS);
  const int g = find_lane() / 4, t = find_lane() % 4;
  for (int i = 0; i < 4; ++i) {
    Sum sum = 0;
    for (int other = 0; other < 4; ++other) {
      const uint *from = all + (4 * g + other) * WORDS + i / 2, *to = all + (4 * (2 * t + i % 2) + other) * WORDS + 4;
      for (int j = 0; j < 2; ++j)
        add(sum, from[2 * j], to[j]);
    }
    sums[i] += sum;
  }
}

// Of two words in one column, the halves `odd`, the first in the lower half.
inline uint join_halves(uint above, uint below, bool odd) {
  return odd ? above >> 16 | (below & 0xFFFF0000u) : (above & 0xFFFFu) | below << 16;
}
} // namespace emulated

template <typename T = bf16> FUNCTION void multiply_tile(float *sums, const uint *a, const uint *b) {
  emulated::multiply_by_lanes(sums, a, b, [](float &sum, uint from, uint to) {
    for (int which = 0; which < 2; ++which)
      sum += half_of<T>(from, which) * half_of<T>(to, which);
  });
}
template <typename A> FUNCTION void multiply_any_bytes(int *sums, const uint *a, const uint *b) {
  emulated::multiply_by_lanes(sums, a, b, [](int &sum, uint from, uint to) { sum += dot_any_bytes<A>(from, to); });
}
FUNCTION void multiply_bytes(int *sums, const uint *a, const uint *b) { multiply_any_bytes<uint8_t>(sums, a, b); }
FUNCTION void multiply_signed_bytes(int *sums, const uint *a, const uint *b) { multiply_any_bytes<int8_t>(sums, a, b); }
FUNCTION int dot_bytes(uint a, uint b) { return dot_any_bytes<int8_t>(a, b); }

FUNCTION void read_tiles(const uint *row, uint *w) {
  const uint *all = emulated::exchange(aligned(row, 16), 4);
  const int lane = emulated::find_lane();
  for (int i = 0; i < 4; ++i)
    w[i] = all[(8 * i + lane / 4) * emulated::WORDS + lane % 4];
}
FUNCTION void read_turned_tiles(const uint *row, uint *w) {
  const uint *all = emulated::exchange(aligned(row, 16), 4);
  const int lane = emulated::find_lane(), column = lane / 4;
  for (int i = 0; i < 4; ++i) {
    const uint *above = all + (8 * i + lane % 4 * 2) * emulated::WORDS + column / 2;
    w[i] = emulated::join_halves(above[0], above[emulated::WORDS], column % 2);
  }
}
FUNCTION uint turn_tile(uint pair) {
  const uint *all = emulated::exchange(&pair, 1);
  const int lane = emulated::find_lane(), column = lane / 4, from = lane % 4 * 8 + column / 2;
  return emulated::join_halves(all[from * emulated::WORDS], all[(from + 4) * emulated::WORDS], column % 2);
}

template <typename T> struct Square { // lane 4 g + t holds columns 2 t, 2 t + 1 of row g
  float v[2];
};
FUNCTION void clear_square(Square<float> &s) { s.v[0] = s.v[1] = 0.0f; }
template <typename T> FUNCTION void read_square(const T *p, Square<T> &s) {
  for (int i = 0; i < 2; ++i)
    s.v[i] = float(aligned(p, 16)[2 * emulated::find_lane() + i]);
}
FUNCTION void read_wide_square(const float *p, int width, Square<float> &s) {
  for (int i = 0; i < 2; ++i)
    s.v[i] = p[emulated::find_lane() / 4 * width + 2 * (emulated::find_lane() % 4) + i];
}
template <typename T> FUNCTION void read_turned_square(const T *p, Square<T> &s) {
  for (int i = 0; i < 2; ++i)
    s.v[i] = float(aligned(p, 16)[(2 * (emulated::find_lane() % 4) + i) * 8 + emulated::find_lane() / 4]);
}
FUNCTION void write_square(float *p, int width, const Square<float> &s) {
  for (int i = 0; i < 2; ++i)
    p[emulated::find_lane() / 4 * width + 2 * (emulated::find_lane() % 4) + i] = s.v[i];
}
FUNCTION void write_turned_square(float *p, int width, const Square<float> &s) {
  for (int i = 0; i < 2; ++i)
    p[(2 * (emulated::find_lane() % 4) + i) * width + emulated::find_lane() / 4] = s.v[i];
}
template <typename A, typename B>
FUNCTION void multiply_square(Square<float> &sums, const Square<A> &a, const Square<B> &b) {
  const uint words[4] = {float_to_bits(a.v[0]), float_to_bits(a.v[1]), float_to_bits(b.v[0]), float_to_bits(b.v[1])};
  const uint *all = emulated::exchange(words, 4);
  const int row = emulated::find_lane() / 4, column = emulated::find_lane() % 4;
  for (int i = 0; i < 2; ++i)
    for (int k = 0; k < 8; ++k)
      sums.v[i] = std::fma(bits_to_float(all[(4 * row + k / 2) * emulated::WORDS + k % 2]),
                           bits_to_float(all[(4 * k + column) * emulated::WORDS + 2 + i]), sums.v[i]);
}
