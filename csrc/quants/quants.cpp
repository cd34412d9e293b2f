// Decoding of raw blocks, one function per type, written to be read. See quants.h.
//
// Each value is computed as ggml defines it, w = d*sc*q - m with d*sc exact in f32, so it has one rounding at
// most and equals every other faithful decoder bit for bit.
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

// 2^(e-128): half of the E8M0 scale, since the table below holds twice the E2M1 values.
float half_of_e8m0(uint8_t e) {
    return float_from_bits(e < 2 ? 0x00200000u << e : (static_cast<uint32_t>(e) - 1) << 23);
}

constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

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

// 4 bits, blocks of 32: d f16, 16 bytes; low nibbles are elements 0..15, high nibbles 16..31.
void decode_q4_0(const uint8_t* block, int64_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 18, out += 32) {
        const float d = read_half(block);
        for (int j = 0; j < 16; ++j) {
            out[j] = d * static_cast<float>((block[2 + j] & 15) - 8);
            out[j + 16] = d * static_cast<float>((block[2 + j] >> 4) - 8);
        }
    }
}

void decode_q4_1(const uint8_t* block, int64_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 20, out += 32) {
        const float d = read_half(block), m = read_half(block + 2);
        for (int j = 0; j < 16; ++j) {
            out[j] = d * static_cast<float>(block[4 + j] & 15) + m;
            out[j + 16] = d * static_cast<float>(block[4 + j] >> 4) + m;
        }
    }
}

void decode_q5_0(const uint8_t* block, int64_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 22, out += 32) {
        const float d = read_half(block);
        const uint32_t high = read<uint32_t>(block + 2);
        for (int j = 0; j < 16; ++j) {
            const int low = (block[6 + j] & 15) | ((high >> j) & 1) << 4;
            const int up = (block[6 + j] >> 4) | ((high >> (j + 16)) & 1) << 4;
            out[j] = d * static_cast<float>(low - 16);
            out[j + 16] = d * static_cast<float>(up - 16);
        }
    }
}

void decode_q5_1(const uint8_t* block, int64_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 24, out += 32) {
        const float d = read_half(block), m = read_half(block + 2);
        const uint32_t high = read<uint32_t>(block + 4);
        for (int j = 0; j < 16; ++j) {
            const int low = (block[8 + j] & 15) | ((high >> j) & 1) << 4;
            const int up = (block[8 + j] >> 4) | ((high >> (j + 16)) & 1) << 4;
            out[j] = d * static_cast<float>(low) + m;
            out[j + 16] = d * static_cast<float>(up) + m;
        }
    }
}

void decode_q8_0(const uint8_t* block, int64_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 34, out += 32) {
        const float d = read_half(block);
        for (int j = 0; j < 32; ++j) out[j] = d * static_cast<float>(static_cast<int8_t>(block[2 + j]));
    }
}

// scales[16] (low nibble scale, high nibble min), qs[64] of 2 bits, d, dmin.
void decode_q2_k(const uint8_t* block, int64_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 84, out += 256) {
        const uint8_t* qs = block + 16;
        const float d = read_half(block + 80), dmin = read_half(block + 82);
        for (int k = 0; k < 256; ++k) {
            const int scale = block[k / 16];
            const int q = (qs[k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2)) & 3;
            out[k] = d * static_cast<float>(scale & 15) * static_cast<float>(q) - dmin * static_cast<float>(scale >> 4);
        }
    }
}

// hmask[32], qs[64] of 2 bits, 12 bytes with 16 scales of 6 bits, d.
void decode_q3_k(const uint8_t* block, int64_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 110, out += 256) {
        const uint8_t *qs = block + 32, *packed = block + 96;
        const float d = read_half(block + 108);
        for (int k = 0; k < 256; ++k) {
            const int s = k / 16;
            const int low = s < 8 ? packed[s] & 15 : packed[s - 8] >> 4;
            const int scale = (low | ((packed[8 + s % 4] >> (s / 4 * 2)) & 3) << 4) - 32;
            const int high = (block[k % 32] >> (k / 32)) & 1;
            const int q = ((qs[k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2)) & 3) + 4 * high - 4;
            out[k] = d * static_cast<float>(scale) * static_cast<float>(q);
        }
    }
}

// The 6-bit scale and min of group j (0..7) out of the 12 bytes that Q4_K and Q5_K share.
void read_scale_min(const uint8_t* s, int j, int& scale, int& min) {
    if (j < 4) {
        scale = s[j] & 63;
        min = s[j + 4] & 63;
    } else {
        scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        min = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
    }
}

void decode_q4_k(const uint8_t* block, int64_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 144, out += 256) {
        const float d = read_half(block), dmin = read_half(block + 2);
        for (int group = 0; group < 8; ++group) {
            int scale, min;
            read_scale_min(block + 4, group, scale, min);
            const float step = d * static_cast<float>(scale), shift = dmin * static_cast<float>(min);
            const uint8_t* qs = block + 16 + group / 2 * 32;
            for (int l = 0; l < 32; ++l) {
                out[32 * group + l] = step * static_cast<float>((qs[l] >> (group % 2 * 4)) & 15) - shift;
            }
        }
    }
}

void decode_q5_k(const uint8_t* block, int64_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 176, out += 256) {
        const float d = read_half(block), dmin = read_half(block + 2);
        for (int group = 0; group < 8; ++group) {
            int scale, min;
            read_scale_min(block + 4, group, scale, min);
            const float step = d * static_cast<float>(scale), shift = dmin * static_cast<float>(min);
            const uint8_t *high = block + 16, *qs = block + 48 + group / 2 * 32;
            for (int l = 0; l < 32; ++l) {
                const int q = ((qs[l] >> (group % 2 * 4)) & 15) | ((high[l] >> group) & 1) << 4;
                out[32 * group + l] = step * static_cast<float>(q) - shift;
            }
        }
    }
}

// ql[128] low nibbles, qh[64] upper 2 bits, int8 scales[16], d.
void decode_q6_k(const uint8_t* block, int64_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 210, out += 256) {
        const float d = read_half(block + 208);
        for (int k = 0; k < 256; ++k) {
            const int half = k / 128, part = k % 128 / 32, l = k % 32;
            const int low = (block[64 * half + part % 2 * 32 + l] >> (part / 2 * 4)) & 15;
            const int high = (block[128 + 32 * half + l] >> (2 * part)) & 3;
            const float step = d * static_cast<float>(static_cast<int8_t>(block[192 + k / 16]));
            out[k] = step * static_cast<float>((low | high << 4) - 32);
        }
    }
}

// d f32, qs int8[256], 16 sums of 16 as int16 (not needed for decoding).
void decode_q8_k(const uint8_t* block, int64_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 292, out += 256) {
        const float d = read<float>(block);
        for (int k = 0; k < 256; ++k) out[k] = d * static_cast<float>(static_cast<int8_t>(block[4 + k]));
    }
}

void decode_nibbles(const uint8_t* qs, const int8_t* values, float d, float* out) {
    for (int j = 0; j < 16; ++j) {
        out[j] = d * static_cast<float>(values[qs[j] & 15]);
        out[j + 16] = d * static_cast<float>(values[qs[j] >> 4]);
    }
}

void decode_iq4_nl(const uint8_t* block, int64_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 18, out += 32) {
        decode_nibbles(block + 2, kIq4Values, read_half(block), out);
    }
}

// d, scales_h u16 (2 bits per group), scales_l[4] (4 bits per group), qs[128] as 8 groups in the order of
// Q4_0.
void decode_iq4_xs(const uint8_t* block, int64_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 136, out += 256) {
        const float d = read_half(block);
        const int high = read<uint16_t>(block + 2);
        for (int group = 0; group < 8; ++group) {
            const int low = (block[4 + group / 2] >> (group % 2 * 4)) & 15;
            const int scale = (low | ((high >> (2 * group)) & 3) << 4) - 32;
            decode_nibbles(block + 8 + 16 * group, kIq4Values, d * static_cast<float>(scale), out + 32 * group);
        }
    }
}

void decode_mxfp4(const uint8_t* block, int64_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 17, out += 32) {
        decode_nibbles(block + 1, kMxfp4Values, half_of_e8m0(block[0]), out);
    }
}

// scale and bias f32, then for each 32 columns 16 bytes in the order of Q4_0.
template <int Groups>
void decode_affine4(const uint8_t* block, int64_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 8 + 16 * Groups, out += 32 * Groups) {
        const float scale = read<float>(block), bias = read<float>(block + 4);
        for (int j = 0; j < 16 * Groups; ++j) {
            float* const low = out + j / 16 * 32 + j % 16;
            low[0] = scale * static_cast<float>(block[8 + j] & 15) + bias;
            low[16] = scale * static_cast<float>(block[8 + j] >> 4) + bias;
        }
    }
}

// scale and bias f32, then a byte for each column.
template <int Groups>
void decode_affine8(const uint8_t* block, int64_t blocks, float* out) {
    for (; blocks > 0; --blocks, block += 8 + 32 * Groups, out += 32 * Groups) {
        const float scale = read<float>(block), bias = read<float>(block + 4);
        for (int j = 0; j < 32 * Groups; ++j) out[j] = scale * static_cast<float>(block[8 + j]) + bias;
    }
}

constexpr TypeInfo kTypes[] = {
#define TYPE(name, code, columns, bytes, decode, ...) {#name, columns, bytes, decode},
#include "tables/types.def"
};

}  // namespace

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
