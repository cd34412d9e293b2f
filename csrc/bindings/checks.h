// What the bindings of operators share: the kinds of arrays they take, and the checks of what an index or a length in
// the arguments could break (ValueError naming operator and argument).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>

#include "operators/operator_table.h"
#include "runtime/runtime.h"

namespace nb = nanobind;

namespace {

using mlxr::Runtime;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MatrixOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OptionalVector = std::optional<Vector>;
using Heads = nb::ndarray<const float, nb::ndim<3>, nb::device::cpu>;
using HeadsOut = nb::ndarray<float, nb::ndim<3>, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MaskMatrix = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntMatrix = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntMatrixOut = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using IntsOut = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using DoubleMatrix = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using DoubleMatrixOut = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using DoublesOut = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Pool = nb::ndarray<nb::ro, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using PoolOut = nb::ndarray<nb::ndim<4>, nb::c_contig, nb::device::cpu>;

template <typename Array>
int64_t size_of(const Array& array, size_t axis) {
    return static_cast<int64_t>(array.shape(axis));
}

[[noreturn]] void refuse(const std::string& what, const std::string& has, const std::string& wants) {
    throw nb::value_error((what + " is " + has + ", expected " + wants).c_str());
}

inline void check_size(const char* what, int64_t has, int64_t wants) {
    if (has != wants) refuse(what, std::to_string(has), std::to_string(wants));
}

inline void check_between(const char* what, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most) {
        refuse(what, std::to_string(value), std::to_string(least) + " to " + std::to_string(most));
    }
}

// Every value of `values` in [0, limit).
inline void check_indices(const char* what, const int32_t* values, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; ++i) {
        if (values[i] < 0 || values[i] >= limit) {
            refuse(std::string(what) + "[" + std::to_string(i) + "]", std::to_string(values[i]),
                   "0 to " + std::to_string(limit - 1));
        }
    }
}

// The token stride, in elements, of an array whose last two axes must be contiguous.
template <typename Array>
int64_t token_stride_of(const char* what, const Array& array) {
    const bool heads_packed = array.stride(1) == size_of(array, 2) || array.shape(1) == 1;
    if ((array.stride(2) != 1 && array.shape(2) != 1) || !heads_packed) {
        refuse(what, "strided in heads or head_dim", "heads and head_dim contiguous");
    }
    return array.stride(0);
}

// Without the GIL, and alone on the runtime.
template <typename Body>
void run_alone(Runtime& runtime, Body&& body) {
    nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> lock(runtime.mutex);
    body();
}

// float32, float16, int8, or bf16 as uint16 (NumPy has no bf16).
template <typename Array>
mlxr::PageType page_type_of(const char* operator_name, const char* what, const Array& pool) {
    const auto code = pool.dtype().code;
    const bool is_float = code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float);
    if (pool.dtype().lanes == 1) {
        if (is_float && pool.dtype().bits == 32) return mlxr::PageType::f32;
        if (is_float && pool.dtype().bits == 16) return mlxr::PageType::f16;
        if (code == static_cast<uint8_t>(nb::dlpack::dtype_code::UInt) && pool.dtype().bits == 16) {
            return mlxr::PageType::bf16;
        }
        if (code == static_cast<uint8_t>(nb::dlpack::dtype_code::Int) && pool.dtype().bits == 8) {
            return mlxr::PageType::q8;
        }
    }
    refuse(std::string(operator_name) + ": " + what, "of another type", "float16, float32, uint16 (bf16) or int8 (q8)");
}

template <typename Array>
void check_pools(const char* operator_name, const Array& k_pool, const Array& v_pool) {
    const auto name = [&](const char* what) { return std::string(operator_name) + ": " + what; };
    for (size_t axis = 0; axis < 4; ++axis) {
        if (v_pool.shape(axis) != k_pool.shape(axis)) {
            refuse(name("axis ") + std::to_string(axis) + " of v_pool", std::to_string(v_pool.shape(axis)),
                   std::to_string(k_pool.shape(axis)));
        }
        if (k_pool.shape(axis) == 0) refuse(name("k_pool"), "empty", "at least one page");
    }
    if (page_type_of(operator_name, "k_pool", k_pool) != page_type_of(operator_name, "v_pool", v_pool)) {
        refuse(name("v_pool"), "of another type than k_pool", "the same");
    }
}

// Numbers in one head of a pool.
template <typename Array>
int64_t head_dim_of(mlxr::PageType type, const Array& pool) {
    const int64_t dim = size_of(pool, 3) - mlxr::scale_bytes(type);
    if (dim < 1) refuse("head_dim of the pools", std::to_string(dim), "at least 1");
    return dim;
}

// The pages that some query of a sequence sees; entries before a sliding window may be anything.
inline void check_sequence(const mlxr::AttendCall& call, int64_t sequence, int64_t tokens, int64_t pages) {
    const auto index = [&] { return "[" + std::to_string(sequence) + "]"; };
    const int64_t start = call.query_starts[sequence], stop = call.query_starts[sequence + 1];
    const int64_t context = call.context_lengths[sequence];
    if (stop < start || start < 0 || stop > tokens) {
        refuse("attend: query_starts" + index(), std::to_string(start) + " before " + std::to_string(stop),
               "ascending from 0 to " + std::to_string(tokens));
    }
    if (context < stop - start || context > call.table_stride * call.page_size) {
        refuse("attend: context_lengths" + index(), std::to_string(context),
               std::to_string(stop - start) + " to " + std::to_string(call.table_stride * call.page_size) +
                   " (queries, and positions in the page table)");
    }
    if (stop == start) return;
    const int64_t first_visible = std::max<int64_t>(context - (stop - start) + 1 - call.window, 0);
    for (int64_t i = first_visible / call.page_size; i <= (context - 1) / call.page_size; ++i) {
        const int32_t page = call.page_table[sequence * call.table_stride + i];
        if (page < 0 || page >= pages) {
            refuse("attend: page_table[" + std::to_string(sequence) + ", " + std::to_string(i) + "]",
                   std::to_string(page), "0 to " + std::to_string(pages - 1));
        }
    }
}

inline mlxr::Activation parse_activation(const char* what, const std::string& kind) {
#define ACTIVATION(name, parameters) \
    if (kind == #name) return mlxr::Activation::name;
#include "tables/activations.def"
    std::string known;
#define ACTIVATION(name, parameters) known += known.empty() ? #name : ", " #name;
#include "tables/activations.def"
    refuse(what, kind, known);
}

// The numbers that belong to an activation.
inline mlxr::ActivationParameters check_parameters(const char* what, mlxr::Activation kind,
                                                   const std::vector<float>& numbers) {
    check_size(what, static_cast<int64_t>(numbers.size()), mlxr::count_parameters(kind));
    mlxr::ActivationParameters parameters;
    std::copy(numbers.begin(), numbers.end(), parameters.numbers);
    return parameters;
}

// A call of balance_streams, but for its rows.
inline mlxr::BalanceStreamsCall check_balance(const char* what, int64_t streams, const Vector& scale,
                                              const Vector& base, int64_t turns, float eps) {
    check_between(what, streams, 1, mlxr::kMostStreams);
    check_between(what, turns, 1, 1 << 10);
    check_size(what, size_of(scale, 0), 3);
    check_size(what, size_of(base, 0), (2 + streams) * streams);
    return {nullptr, scale.data(), base.data(), nullptr, streams, 2 + streams, turns, eps};
}

// A call of rope for `tokens` tokens, but for what is rotated.
inline mlxr::RopeCall check_rope(const Ints& positions, const Matrix& cosines, const Matrix& sines, bool interleaved,
                                 int64_t tokens, int64_t head_dim) {
    const int64_t half = size_of(cosines, 1);
    mlxr::RopeCall call{};
    call.head_dim = head_dim;
    call.positions = positions.data();
    call.cosines = cosines.data();
    call.sines = sines.data();
    call.rot_dim = 2 * half;
    call.interleaved = interleaved;
    check_size("rope: length of positions", size_of(positions, 0), tokens);
    check_size("rope: rows of sin", size_of(sines, 0), size_of(cosines, 0));
    check_size("rope: columns of sin", size_of(sines, 1), half);
    if (call.rot_dim > std::min(head_dim, mlxr::kMaxRotDim)) {
        refuse("rope: rot_dim of table", std::to_string(call.rot_dim),
               "at most the head_dim of x and " + std::to_string(mlxr::kMaxRotDim));
    }
    check_indices("rope: positions", call.positions, tokens, size_of(cosines, 0));
    return call;
}

// A call of write_pages for the keys, but for what is written; that for the values differs in `pool` and `values`.
inline mlxr::WritePagesCall check_write(const PoolOut& k_pool, const PoolOut& v_pool, const Ints& slots,
                                        int64_t tokens) {
    check_pools("write_pages", k_pool, v_pool);
    mlxr::WritePagesCall call{};
    call.tokens = tokens;
    call.kv_heads = size_of(k_pool, 1);
    call.page_size = size_of(k_pool, 2);
    call.slots = slots.data();
    call.pool = k_pool.data();
    call.type = page_type_of("write_pages", "k_pool", k_pool);
    call.head_dim = head_dim_of(call.type, k_pool);
    check_size("write_pages: tokens of k and v", tokens, size_of(slots, 0));
    check_indices("write_pages: slots", slots.data(), tokens, size_of(k_pool, 0) * call.page_size);
    return call;
}

// Positions that a row sees, its own included; 0 for all.
inline int64_t positions_seen(int64_t window) {
    return window > 0 ? window : mlxr::kAllPositions;
}

// 0 for none.
inline float check_softcap(const char* what, float softcap) {
    if (!(softcap >= 0)) refuse(what, std::to_string(softcap), "0 or more");
    return softcap;
}

// How far the biases of scores reach each way, which are as many for each of some heads, one for each distance.
inline int64_t check_biases(const char* what, const OptionalVector& biases, int64_t heads) {
    if (!biases) return 0;
    const int64_t length = size_of(*biases, 0), span = (length / heads - 1) / 2;
    if (span < 0 || length != heads * (2 * span + 1)) {
        refuse(what, std::to_string(length), "an odd number for each of " + std::to_string(heads) + " heads");
    }
    return span;
}

// `pool` is shaped as that of `call`, of `pages` pages.
inline void check_alike(const char* what, const PoolOut& pool, const mlxr::WritePagesCall& call, int64_t pages) {
    if (size_of(pool, 0) == pages && size_of(pool, 1) == call.kv_heads && size_of(pool, 2) == call.page_size &&
        size_of(pool, 3) == call.head_dim + mlxr::scale_bytes(call.type) &&
        page_type_of("write_pages", "k_pool", pool) == call.type) {
        return;
    }
    refuse(what, "of different shapes or types", "all alike");
}

// Where the positions end that tokens see, after their own ones and within their contexts; null for none.
inline const int32_t* check_ends(const Ints& ends, const Ints& query_starts, const Ints& context_lengths) {
    const int64_t tokens = size_of(ends, 0), sequences = size_of(context_lengths, 0);
    if (tokens == 0) return nullptr;
    check_size("attend: length of ends", tokens, query_starts.data()[sequences]);
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
        const int64_t stop = query_starts.data()[sequence + 1], length = context_lengths.data()[sequence];
        int64_t low = 0;
        for (int64_t token = query_starts.data()[sequence]; token < stop; ++token) {
            const int64_t own = length - stop + token + 1, end = ends.data()[token];
            if (end < std::max(own, low) || end > length) {
                refuse("attend: ends[" + std::to_string(token) + "]", std::to_string(end),
                       "ascending, " + std::to_string(own) + " to " + std::to_string(length));
            }
            low = end;
        }
    }
    return ends.data();
}

// A call of attend, but for q, its stride, and out. With a `value_dim` values are the last numbers of their keys.
template <typename Array>
mlxr::AttendCall check_attend(const Array& k_pool, const Array& v_pool, const Ints& query_starts,
                              const Ints& context_lengths, const IntMatrix& page_table, int64_t tokens, int64_t heads,
                              float scale, int64_t window, int64_t value_dim) {
    check_pools("attend", k_pool, v_pool);
    const int64_t sequences = size_of(context_lengths, 0);
    mlxr::AttendCall call{};
    call.k_pool = k_pool.data();
    call.v_pool = v_pool.data();
    call.type = page_type_of("attend", "k_pool", k_pool);
    call.heads = heads;
    call.kv_heads = size_of(k_pool, 1);
    call.page_size = size_of(k_pool, 2);
    call.head_dim = head_dim_of(call.type, k_pool);
    call.values_in_keys = value_dim != 0;
    call.value_dim = value_dim != 0 ? value_dim : call.head_dim;
    call.padded_dim = (call.head_dim + 15) / 16 * 16;
    call.padded_value = (call.value_dim + 15) / 16 * 16;
    if (call.value_dim < 1 || call.value_dim > call.head_dim || (call.head_dim - call.value_dim) % 2 != 0) {
        refuse("attend: value_dim", std::to_string(value_dim),
               "at most the head_dim " + std::to_string(call.head_dim) + ", and less by an even number");
    }
    call.scale = scale;
    call.window = positions_seen(window);
    call.query_starts = query_starts.data();
    call.context_lengths = context_lengths.data();
    call.page_table = page_table.data();
    call.table_stride = size_of(page_table, 1);
    if (heads == 0 || heads % call.kv_heads != 0) {
        refuse("attend: heads of q", std::to_string(heads),
               "a multiple of the " + std::to_string(call.kv_heads) + " key heads");
    }
    call.group = heads / call.kv_heads;
    check_size("attend: length of query_starts", size_of(query_starts, 0), sequences + 1);
    check_size("attend: rows of page_table", size_of(page_table, 0), sequences);
    check_size("attend: first of query_starts", call.query_starts[0], 0);
    check_size("attend: last of query_starts", call.query_starts[sequences], tokens);
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
        check_sequence(call, sequence, tokens, size_of(k_pool, 0));
    }
    return call;
}

}  // namespace
