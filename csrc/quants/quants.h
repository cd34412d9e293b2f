// The weight types the kernels know: names as ggml spells them and block sizes. Block layouts are those of GGUF files
// (ggml-common.h), and of formats/mlx_affine.py for the affine types; all little endian.
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
};

const TypeInfo& type_info(Type type);

// `count` numbers of f32, f16 or bf16 to f32, exactly. Blocks are decoded by the kernels of a tier (kernel_table.h).
void decode_floats(Type type, const uint8_t* source, int64_t count, float* out);

// Sets `type` and returns true when `name` is a known type.
bool parse_type(std::string_view name, Type& type);

}  // namespace mlxr
