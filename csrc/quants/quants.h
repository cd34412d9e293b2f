// The weight types the kernels know: names as ggml spells them, block sizes, and exact decoding of raw blocks
// to f32. Block layouts are those of GGUF files (ggml-common.h), and of formats/mlx_affine.py for the affine types;
// all little endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace mlxr {

enum class Type : int {
    f32,
    f16,
    bf16,
    q4_0,
    q4_1,
    q5_0,
    q5_1,
    q8_0,
    q2_k,
    q3_k,
    q4_k,
    q5_k,
    q6_k,
    q8_k,
    iq4_nl,
    iq4_xs,
    mxfp4,
    affine4_32,
    affine4_64,
    affine8_32,
    affine8_64,
    count
};
inline constexpr int kTypeCount = static_cast<int>(Type::count);

struct TypeInfo {
    const char* name;
    int block_elements;  // elements in one block; a row holds whole blocks
    int block_bytes;
    void (*decode)(const uint8_t* block, int64_t blocks,
                   float* out);  // exact: the values ggml's definition gives
};

const TypeInfo& type_info(Type type);

// Sets `type` and returns true when `name` is a known type.
bool parse_type(std::string_view name, Type& type);

}  // namespace mlxr
