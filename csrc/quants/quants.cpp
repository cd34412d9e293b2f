// See quants.h.
#include "quants/quants.h"

#include <cstring>

namespace mlxr {

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "GGUF blocks are little endian");

template <typename T>
T read(const uint8_t* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

float float_from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// IEEE half to single, exact, subnormals included. The exponent is moved by multiplying, which normalises
// subnormals.
float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t rest = static_cast<uint32_t>(half & 0x7fffu) << 13;
    if (rest >= 0x0f800000u) return float_from_bits(sign | rest | 0x7f800000u);  // infinity or NaN
    const float magnitude = float_from_bits(rest) * 0x1p112f;
    return sign ? -magnitude : magnitude;
}

float read_half(const uint8_t* p) {
    return half_to_float(read<uint16_t>(p));
}

void decode_f32(const uint8_t* block, int64_t blocks, float* out) {
    std::memcpy(out, block, static_cast<size_t>(blocks) * sizeof(float));
}

void decode_f16(const uint8_t* block, int64_t blocks, float* out) {
    for (int64_t i = 0; i < blocks; ++i) out[i] = read_half(block + 2 * i);
}

void decode_bf16(const uint8_t* block, int64_t blocks, float* out) {
    for (int64_t i = 0; i < blocks; ++i) {
        out[i] = float_from_bits(static_cast<uint32_t>(read<uint16_t>(block + 2 * i)) << 16);
    }
}

constexpr TypeInfo kTypes[] = {
#define TYPE(name, code, columns, bytes, ...) {#name, columns, bytes},
#include "tables/types.def"
};

}  // namespace

void decode_floats(Type type, const uint8_t* source, int64_t count, float* out) {
    if (type == Type::f16) return decode_f16(source, count, out);
    if (type == Type::bf16) return decode_bf16(source, count, out);
    decode_f32(source, count, out);
}

const TypeInfo& type_info(Type type) {
    return kTypes[static_cast<int>(type)];
}

bool parse_type(std::string_view name, Type& type) {
    for (int i = 0; i < kTypeCount; ++i) {
        if (name == kTypes[i].name) {
            type = static_cast<Type>(i);
            return true;
        }
    }
    return false;
}

}  // namespace mlxr
