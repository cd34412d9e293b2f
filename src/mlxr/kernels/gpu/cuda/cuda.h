// The words of a kernel body in CUDA C++. See emulated.h for what each of them means.
#define DEVICE
#define PRIVATE
#define SHARED __shared__ __align__(16)
#define GROUP
#define TABLE __device__ const
#define FUNCTION __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")

typedef __nv_bfloat16 bf16;
typedef __half f16;
typedef unsigned int uint;
typedef uint64_t Offset;

FUNCTION float bits_to_float(uint bits) { return __uint_as_float(bits); }
FUNCTION uint float_to_bits(float v) { return __float_as_uint(v); }
FUNCTION float half_bits_to_float(uint bits) { return __half2float(__ushort_as_half((unsigned short)bits)); }
FUNCTION float log_of(float x) { return logf(x); }
FUNCTION float exp_of(float x) { return expf(x); }
FUNCTION float exp2_of(float x) { return exp2f(x); }
FUNCTION float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
FUNCTION float tanh_of(float x) { return tanhf(x); }
FUNCTION float rsqrt_of(float x) { return rsqrtf(x); }
FUNCTION float max_of(float a, float b) { return fmaxf(a, b); }
FUNCTION float quotient_of(float a, float b) { return __fdividef(a, b); }

FUNCTION uint load_u16(const uint8_t *p) { return *reinterpret_cast<const unsigned short *>(p); }
FUNCTION uint load_u32(const uint8_t *p) { return *reinterpret_cast<const uint *>(p); }
FUNCTION void read_words(const uint *p, uint *w) {
  const uint4 v = *reinterpret_cast<const uint4 *>(p);
  w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
}
FUNCTION void load_words(const uint8_t *p, uint *w) { read_words(reinterpret_cast<const uint *>(p), w); }

template <int BYTES> struct Words {};
template <> struct Words<16> { typedef uint4 type; };
template <> struct Words<8> { typedef uint2 type; };
template <> struct Words<4> { typedef uint type; };
template <> struct Words<2> { typedef unsigned short type; };

template <int N, typename T> FUNCTION void load(const T *p, float *out) {
  constexpr int PIECE = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
  typedef typename Words<PIECE * sizeof(T)>::type Word;
#pragma unroll
  for (int i = 0; i < N; i += PIECE) {
    Word word = *reinterpret_cast<const Word *>(p + i);
    T values[PIECE];
    memcpy(values, &word, sizeof(word));
#pragma unroll
    for (int j = 0; j < PIECE; ++j)
      out[i + j] = float(values[j]);
  }
}
template <int N, typename T> FUNCTION void store(T *p, const float *values) {
  constexpr int PIECE = N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
  typedef typename Words<PIECE * sizeof(T)>::type Word;
#pragma unroll
  for (int i = 0; i < N; i += PIECE) {
    T narrow[PIECE];
#pragma unroll
    for (int j = 0; j < PIECE; ++j)
      narrow[j] = T(values[i + j]);
    Word word;
    memcpy(&word, narrow, sizeof(word));
    *reinterpret_cast<Word *>(p + i) = word;
  }
}

FUNCTION void load_shared(const float *p, float *out) {
  const float4 v = *reinterpret_cast<const float4 *>(p);
  out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
}

FUNCTION void store_shared(float *p, const float *v) {
  *reinterpret_cast<float4 *>(p) = make_float4(v[0], v[1], v[2], v[3]);
}

FUNCTION void store_words(uint *p, const uint *w) {
  *reinterpret_cast<uint4 *>(p) = make_uint4(w[0], w[1], w[2], w[3]);
}

FUNCTION float shuffle_xor(float v, uint mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
FUNCTION float sum_lanes(float v) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1)
    v += __shfl_xor_sync(0xffffffffu, v, mask);
  return v;
}
FUNCTION uint vote_lanes(bool v) { return __ballot_sync(0xffffffffu, v); }
FUNCTION int count_bits(uint v) { return __popc(v); }
FUNCTION uint largest_of_lanes(uint v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, v);
#else
  for (int mask = 16; mask > 0; mask >>= 1)
    v = max(v, __shfl_xor_sync(0xffffffffu, v, mask));
  return v;
#endif
}
FUNCTION void barrier() { __syncthreads(); }
FUNCTION void simd_barrier() { __syncwarp(); }
template <typename T> FUNCTION T *writable(const T *p) { return const_cast<T *>(p); }

FUNCTION uint shared_address(const void *p) { return uint(__cvta_generic_to_shared(p)); }
FUNCTION void copy_words(const uint8_t *from, uint *to) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
FUNCTION void stream_words(const uint8_t *from, uint *to) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
FUNCTION void copy_word(const uint8_t *from, uint *to) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
FUNCTION void expect_line(const uint8_t *from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
FUNCTION void seal_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> FUNCTION void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

FUNCTION void await_inputs() {
#ifdef MLXR_STARTS_EARLY
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#ifdef MLXR_OPENS_LATE
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

#define ROOM(name, WORDS) extern __shared__ __align__(128) uint name[]

template <typename T = bf16> FUNCTION uint pack_pair(float low, float high);
template <> FUNCTION uint pack_pair<bf16>(float low, float high) {
  uint pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <> FUNCTION uint pack_pair<f16>(float low, float high) {
  uint pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
FUNCTION float low_of(uint pair) { return __uint_as_float(pair << 16); }
FUNCTION float high_of(uint pair) { return __uint_as_float(pair & 0xFFFF0000u); }
FUNCTION uint widen_bytes(uint word, int which) { return __byte_perm(word, 0x43434343u, which ? 0x4342 : 0x4140); }
FUNCTION uint widen_byte(uint word, int which) { return __byte_perm(word, 0x43434343u, 0x4040 + 0x0101 * which); }
template <int WHICH> FUNCTION uint join_bytes(uint a, uint b, uint c, uint d) {
  return __byte_perm(__byte_perm(a, b, 0x0040 + 0x11 * WHICH), __byte_perm(c, d, 0x0040 + 0x11 * WHICH), 0x5410);
}
FUNCTION uint pick_bytes(uint a, uint b, uint which) { return __byte_perm(a, b, which); }
FUNCTION uint multiply_pairs(uint a, uint b, uint c) {
  uint pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
}
FUNCTION void load_pairs(const bf16 *p, uint *out) { read_words(reinterpret_cast<const uint *>(p), out); }
FUNCTION void load_pairs(const f16 *p, uint *out) {
  float v[8];
  load<8>(p, v);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    out[i] = pack_pair(v[2 * i], v[2 * i + 1]);
}
FUNCTION void load_pairs(const float *p, uint *out) {
  const float4 a = *reinterpret_cast<const float4 *>(p), b = *reinterpret_cast<const float4 *>(p + 4);
  out[0] = pack_pair(a.x, a.y), out[1] = pack_pair(a.z, a.w);
  out[2] = pack_pair(b.x, b.y), out[3] = pack_pair(b.z, b.w);
}

#define MLXR_MULTIPLY(NAME, SUM, PLACE, KIND)                                                                          \
  FUNCTION void NAME(SUM *sums, const uint *a, const uint *b) {                                                        \
    asm("mma.sync.aligned." KIND " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                    \
        : "+" PLACE(sums[0]), "+" PLACE(sums[1]), "+" PLACE(sums[2]), "+" PLACE(sums[3])                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                           \
  }
template <typename T = bf16> FUNCTION void multiply_tile(float *sums, const uint *a, const uint *b);
template <> MLXR_MULTIPLY(multiply_tile<bf16>, float, "f", "m16n8k16.row.col.f32.bf16.bf16.f32")
template <> MLXR_MULTIPLY(multiply_tile<f16>, float, "f", "m16n8k16.row.col.f32.f16.f16.f32")
MLXR_MULTIPLY(multiply_bytes, int, "r", "m16n8k32.row.col.s32.u8.s8.s32")
MLXR_MULTIPLY(multiply_signed_bytes, int, "r", "m16n8k32.row.col.s32.s8.s8.s32")
FUNCTION int dot_bytes(uint a, uint b) { return __dp4a(int(a), int(b), 0); }

FUNCTION void read_tiles(const uint *row, uint *w) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(shared_address(row))
               : "memory");
}
FUNCTION void read_turned_tiles(const uint *row, uint *w) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(shared_address(row))
               : "memory");
}
FUNCTION uint turn_tile(uint pair) {
  uint turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}
