"""The Metal Shading Language as declarations that clang can read: for its syntax checker, nothing runs.

Address spaces are clang's own, so that clang refuses to mix them; types that are no types of C++ are macros, so that
their names cannot be those of variables. Functions have all overloads of MSL's tables, so that calls which are
ambiguous there are so here. What MLX writes in front of a kernel (backend/metal/kernels/utils.h) comes in names alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

_INTEGERS = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong")
_SMALL_INTEGERS = _INTEGERS[:6]
_FLOATS = ("float", "half", "bfloat")
_FLOAT_VECTORS = tuple(f"{kind}{size}" for kind in ("float", "half") for size in (2, 3, 4))
# Functions by the kinds of numbers that they take, and by how many.
_OF_FLOATS = {
    1: "acos acosh asin asinh atan atanh ceil cos cosh cospi exp exp10 exp2 fabs abs floor fract log log10 log2 rint "
    "round rsqrt sin sinh sinpi sqrt tan tanh tanpi trunc sign saturate",
    2: "atan2 copysign divide fdim fmax max fmin min fmod nextafter pow powr step",
    3: "fma fmax3 max3 fmedian3 median3 fmin3 min3 clamp mix smoothstep",
}
_OF_INTEGERS = {
    1: "clz ctz popcount reverse_bits",
    2: "absdiff addsat hadd max min mulhi rhadd rotate subsat",
    3: "clamp madhi madsat max3 median3 min3",
}
_TESTS = {1: "isfinite isinf isnan isnormal signbit", 2: "isordered isunordered"}
_OF_LANES = (
    "simd_sum simd_product simd_max simd_min simd_prefix_exclusive_sum simd_prefix_inclusive_sum "
    "simd_prefix_exclusive_product simd_prefix_inclusive_product simd_broadcast_first quad_sum quad_product quad_max "
    "quad_min"
)
_OF_LANES_BITWISE = "simd_and simd_or simd_xor quad_and quad_or quad_xor"
_FROM_LANES = (
    "simd_broadcast simd_shuffle simd_shuffle_xor simd_shuffle_up simd_shuffle_down simd_shuffle_rotate_up "
    "simd_shuffle_rotate_down quad_broadcast quad_shuffle quad_shuffle_xor quad_shuffle_up quad_shuffle_down"
)
_ATOMIC_CHANGES = "exchange fetch_add fetch_sub fetch_max fetch_min fetch_or fetch_and"

_TYPES = """#pragma once
#define __METAL__ 1
#define __METAL_VERSION__ MSL_VERSION
#define thread __attribute__((annotate("thread")))
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define half _Float16
#define bfloat __bf16
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT 3.402823466e38f
#define HALF_MAX 65504
#define M_PI_F 3.14159265358979323846f
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
"""
_CLASSES = """
template <typename T, int N> using vec = T __attribute__((ext_vector_type(N)));
template <bool B, typename T = void> struct enable_if {};
template <typename T> struct enable_if<true, T> { typedef T type; };
template <bool B, typename T = void> using enable_if_t = typename enable_if<B, T>::type;
template <typename T, T V> struct integral_constant { static constexpr constant T value = V; };
template <bool B> using bool_constant = integral_constant<bool, B>;
template <typename T, typename U> struct is_same : bool_constant<false> {};
template <typename T> struct is_same<T, T> : bool_constant<true> {};
template <typename T> struct numeric_limits {
  static constexpr T max() { return T(); }
  static constexpr T min() { return T(); }
  static constexpr T lowest() { return T(); }
  static constexpr T infinity() { return T(); }
};
struct bias { float v; };
struct level { float v; };
struct gradient2d {};
struct min_lod_clamp {};
struct sampler {};
template <typename T> struct uniform { T v; };
template <typename T, size_t N> struct array { T elements[N]; };
enum class access { sample, read, write, read_write };
enum class coord { normalized, pixel };
enum class filter { nearest, linear };
template <typename T> struct atomic {};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;
enum memory_order {
  memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel, memory_order_seq_cst
};
enum class mem_flags { mem_none, mem_device, mem_threadgroup, mem_texture = 4, mem_threadgroup_imageblock = 8 };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
void atomic_thread_fence(mem_flags, memory_order);
struct simd_vote {
  typedef uint64_t vote_t;
  explicit constexpr simd_vote(vote_t v = 0) : v(v) {}
  explicit constexpr operator vote_t() const { return v; }
  bool all() const;
  bool any() const;
  vote_t v;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();
template <typename T, int C, int R> struct simdgroup_matrix {
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  vec<T, 2> elements;
  thread vec<T, 2> &thread_elements() { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <typename T, int C, int R = C> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
template <typename D, typename A, typename B, typename E>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8> &, simdgroup_matrix<A, 8, 8>,
                                   simdgroup_matrix<B, 8, 8>, simdgroup_matrix<E, 8, 8>);
template <typename D, typename A, typename B>
void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8> &, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>);
"""
_AS_TYPE = """
template <typename T, typename U> inline T as_type(U v) {
  static_assert(sizeof(T) == sizeof(U), "as_type to a type of another size");
  return __builtin_bit_cast(T, v);
}
"""
_OF_MLX = """#pragma once
#include <metal_stdlib>
using namespace metal;
typedef bfloat bfloat16_t;
typedef half float16_t;
inline uint16_t bfloat16_to_uint16(const bfloat16_t x) { return as_type<uint16_t>(x); }
inline bfloat16_t uint16_to_bfloat16(const uint16_t x) { return as_type<bfloat16_t>(x); }
template <typename T> struct complex_t { T real; T imag; };
typedef complex_t<float> complex64_t;
#define MTL_CONST constant
#define MLX_MTL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")
static MTL_CONST constexpr int MAX_REDUCE_SPECIALIZED_DIMS = 4;
static MTL_CONST constexpr int REDUCE_N_READS = 4;
static MTL_CONST constexpr int REDUCE_N_WRITES = 4;
static MTL_CONST constexpr int SOFTMAX_N_READS = 4;
static MTL_CONST constexpr int RMS_N_READS = 4;
static MTL_CONST constexpr int RMS_LOOPED_LIMIT = 4096;
namespace mlx { struct os_log {}; }
template <typename U> struct WorkPerThread { static constexpr int constant n = 8 / sizeof(U); };
template <typename U> struct Limits {};
template <typename IdxT = int64_t>
IdxT elem_to_loc(IdxT elem, constant const int *shape, constant const int64_t *strides, int ndim);
template <typename IdxT = int64_t> IdxT elem_to_loc_1(uint elem, constant const int64_t &stride);
template <int DIM, typename OffsetT = size_t, bool General = true> struct LoopedElemToLoc {};
template <typename T, typename U> inline T ceildiv(T N, U M) { return (N + M - 1) / M; }
float log1p(float x);
bfloat16_t log1p(bfloat16_t x);
complex64_t log1p(complex64_t x);
template <bool condition, typename T, typename U> struct ConditionalType { using type = U; };
template <typename T, typename U> struct ConditionalType<true, T, U> { using type = T; };
template <typename U, typename T> inline U cast_to(T val) { return static_cast<U>(val); }
"""
HEADERS = ("metal_atomic", "metal_common", "metal_integer", "metal_logging", "metal_math", "metal_simdgroup")
MLX_HEADER = "mlx_utils.h"


def make_headers() -> dict[str, str]:
    """The headers by name: those of Metal, and MLX_HEADER, which MLX includes in front of a kernel."""
    matrix = "metal_simdgroup_matrix"
    others = dict.fromkeys((*HEADERS, matrix), "#pragma once\n#include <metal_stdlib>\n")
    mlx = _OF_MLX + "".join(
        f"{kind} {name}({kind}, uint16_t);\n"
        for name, kind in product(
            ("simd_shuffle", "simd_shuffle_up", "simd_shuffle_down"), ("uint64_t", "int64_t", "bool")
        )
    )
    return {"metal_stdlib": _write_library(), MLX_HEADER: mlx, **others}


def _write_library() -> str:
    lines = [_TYPES, *_declare_vectors(), "namespace metal {", _CLASSES, *_declare_functions(), *_declare_memory()]
    for speed in ("fast", "precise"):
        kinds = [kind for kind in (*_FLOATS[:1], *_FLOAT_VECTORS) if kind.startswith("float")]
        lines += [f"namespace {speed} {{", *_overload(_OF_FLOATS, kinds), "}"]
    return "\n".join([*lines, "} // namespace metal", _AS_TYPE])


def _declare_vectors() -> Iterator[str]:
    for kind, size in product((*_INTEGERS, *_FLOATS, "bool"), (2, 3, 4)):
        yield f"typedef {kind} {kind}{size} __attribute__((ext_vector_type({size})));"


def _overload(functions: dict[int, str], kinds: Iterable[str], result: str | None = None) -> Iterator[str]:
    """Every function for every kind of arguments; it returns the same kind, unless `result` says otherwise."""
    for (count, names), kind in product(functions.items(), [*kinds]):
        yield from (f"{result or kind} {name}({', '.join([kind] * count)});" for name in names.split())


def _declare_functions() -> Iterator[str]:
    yield from _overload(_OF_FLOATS, (*_FLOATS, *_FLOAT_VECTORS))
    yield from _overload(_OF_INTEGERS, _INTEGERS)
    yield from (f"{kind if kind.startswith('u') else 'u' + kind} abs({kind});" for kind in _INTEGERS)
    yield from _overload(_TESTS, ("float", "half"), "bool")
    yield from _overload({1: _OF_LANES}, (*_SMALL_INTEGERS, *_FLOATS))
    yield from _overload({1: _OF_LANES_BITWISE}, _SMALL_INTEGERS)
    for name, kind in product(_FROM_LANES.split(), (*_SMALL_INTEGERS, *_FLOATS, "float2", "float4", "uint2", "uint4")):
        yield f"{kind} {name}({kind}, ushort);"
    for kind in ("float", "half"):
        yield f"{kind} frexp({kind}, thread int &); int ilogb({kind}); {kind} ldexp({kind}, int);"
        yield f"{kind} modf({kind}, thread {kind} &); {kind} sincos({kind}, thread {kind} &);"
        for size in (2, 3, 4):
            yield f"{kind} dot({kind}{size}, {kind}{size}); {kind} length({kind}{size});"
            yield f"{kind} distance({kind}{size}, {kind}{size}); {kind}{size} normalize({kind}{size});"
    yield "int mad24(int, int, int); uint mad24(uint, uint, uint); int mul24(int, int); uint mul24(uint, uint);"
    yield "template <typename T> T extract_bits(T, uint, uint); template <typename T> T insert_bits(T, T, uint, uint);"
    yield "template <typename T> T select(T, T, bool); bool any(bool4); bool all(bool4);"
    yield "float4 unpack_unorm4x8_to_float(uint); float4 unpack_snorm4x8_to_float(uint);"
    yield "uint pack_float_to_unorm4x8(float4); uint pack_half_to_snorm2x16(half2);"


def _declare_memory() -> Iterator[str]:
    """Atomics, and matrices of a SIMD-group, in the address spaces that have them."""
    for space, kind in product(("device", "threadgroup"), ("int", "uint")):
        where = f"volatile {space} atomic_{kind} *"
        yield f"{kind} atomic_load_explicit(const {where}, memory_order);"
        yield f"void atomic_store_explicit({where}, {kind}, memory_order);"
        for change in _ATOMIC_CHANGES.split():
            yield f"{kind} atomic_{change}_explicit({where}, {kind}, memory_order);"
    matrix, rest = "template <typename T, int C, int R> void simdgroup", "ulong = C, ulong2 = ulong2(0), bool = false);"
    for space in ("device", "threadgroup"):
        yield f"{matrix}_load(thread simdgroup_matrix<T, C, R> &, const {space} T *, {rest}"
        yield f"{matrix}_store(simdgroup_matrix<T, C, R>, {space} T *, {rest}"
