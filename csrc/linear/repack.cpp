// See repack.h. Field by field a transposition of 16 rows; memory-bound, hidden behind reading the file.
#include "linear/repack.h"

#include <algorithm>
#include <cstring>

#include "kernel_table.h"
#include "linear/layout.h"

namespace mlxr {

namespace {

const Layout& layout(Type type) {
    return kLayouts[static_cast<int>(type) - static_cast<int>(Type::q4_0)];
}

// Bit 4*i+b to bit 8*b+i: every fourth bit, from bit b on, gathered into byte b.
uint32_t spread_fifth_bits(uint32_t bits) {
    uint32_t out = 0;
    for (int b = 0; b < 4; ++b) {
        uint32_t x = (bits >> b) & 0x11111111u;
        x = (x | x >> 3) & 0x03030303u;
        x = (x | x >> 6) & 0x000f000fu;
        x = (x | x >> 12) & 0x000000ffu;
        out |= x << (8 * b);
    }
    return out;
}

template <typename T>
void transpose(const uint8_t* source, int64_t stride, int rows, int count, uint8_t* out) {
    for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < count; ++i) {
            std::memcpy(out + sizeof(T) * (16 * i + r), source + r * stride + sizeof(T) * i, sizeof(T));
        }
    }
}

// One unit: the source block of each of `rows` rows, `stride` bytes apart.
void repack_unit(const Layout& layout, const uint8_t* source, int64_t stride, int rows, uint8_t* out) {
    for (const Field& field : layout.fields) {
        const uint8_t* from = source + field.offset;
        switch (field.kind) {
            case FieldKind::words:
                transpose<uint32_t>(from, stride, rows, field.count, out);
                out += 64 * field.count;
                break;
            case FieldKind::halves:
                transpose<uint16_t>(from, stride, rows, field.count, out);
                out += 32 * field.count;
                break;
            case FieldKind::bytes:
                transpose<uint8_t>(from, stride, rows, field.count, out);
                out += 16 * field.count;
                break;
            case FieldKind::fifth_bits:
                for (int r = 0; r < rows; ++r) {
                    uint32_t bits;
                    std::memcpy(&bits, from + r * stride, sizeof bits);
                    bits = spread_fifth_bits(bits);
                    std::memcpy(out + 4 * r, &bits, sizeof bits);
                }
                out += 64 * field.count;
                break;
        }
    }
}

template <typename T>
void repack_dense(const uint8_t* source, int rows, int64_t columns, uint8_t* out) {
    constexpr int64_t kColumns = 64 / sizeof(T);  // one cache line of each row at a time
    for (int64_t first = 0; first < columns; first += kColumns) {
        const int64_t last = std::min(columns, first + kColumns);
        for (int r = 0; r < rows; ++r) {
            for (int64_t k = first; k < last; ++k) {
                std::memcpy(out + sizeof(T) * (kDenseRows * k + r), source + sizeof(T) * (r * columns + k), sizeof(T));
            }
        }
    }
}

// bf16: for each pair of columns a word of each row; of an odd last column the upper half stays zero.
void repack_pairs(const uint8_t* source, int rows, int64_t columns, uint8_t* out) {
    constexpr int64_t kColumns = 32;
    for (int64_t first = 0; first < columns; first += kColumns) {
        const int64_t last = std::min(columns, first + kColumns);
        for (int r = 0; r < rows; ++r) {
            for (int64_t k = first; k < last; ++k) {
                std::memcpy(out + 4 * (kDenseRows * (k / 2) + r) + 2 * (k % 2), source + 2 * (r * columns + k), 2);
            }
        }
    }
}

}  // namespace

int64_t block_rows(Type type) {
    return is_dense(type) ? kDenseRows : kRepackRows;
}

int64_t block_bytes(Type type, int64_t columns) {
    const TypeInfo& info = type_info(type);
    if (type == Type::bf16) return kDenseRows * ((columns + 1) / 2) * 4;
    if (is_dense(type)) return kDenseRows * columns * info.block_bytes;
    return columns / info.block_elements * unit_bytes(type);
}

void repack_block(Type type, const uint8_t* source, int64_t rows, int64_t columns, int64_t block, uint8_t* out) {
    const TypeInfo& info = type_info(type);
    const int64_t units = columns / info.block_elements, stride = units * info.block_bytes;
    const int64_t first = block * block_rows(type);
    const int valid = static_cast<int>(std::min(block_rows(type), rows - first));
    source += first * stride;
    if (type == Type::f32) {
        repack_dense<uint32_t>(source, valid, columns, out);
    } else if (type == Type::bf16) {
        if (columns % 2 == 0) return repack_dense<uint32_t>(source, valid, columns / 2, out);  // a pair is a word
        repack_pairs(source, valid, columns, out);
    } else if (is_dense(type)) {
        repack_dense<uint16_t>(source, valid, columns, out);
    } else {
        for (int64_t u = 0; u < units; ++u) {
            repack_unit(layout(type), source + u * info.block_bytes, stride, valid, out + u * unit_bytes(type));
        }
    }
}

}  // namespace mlxr
