// The weight types the kernels know: names as ggml spells them, block sizes, and exact decoding of raw blocks
// to f32. Block layouts are those of GGUF files (ggml-common.h), and of formats/mlx_affine.py for the affine types;
// all little endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace mlxr {

enum class Type : int {
#define TYPE(name, ...) name,
#include "tables/types.def"
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
