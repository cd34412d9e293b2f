// See repack.h. Field by field a transposition of 16 rows; memory-bound, hidden behind reading the file. f16 is made
// into blocks of integers on the way.
#include "linear/repack.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include "linear/layout.h"
#include "runtime/kernel_table.h"

namespace mlxr {

namespace {

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

// Bits 8*i+2*b to bits 8*b+2*i: four by four numbers of two bits exchange rows and columns.
uint32_t exchange_two_bits(uint32_t bits) {
    const uint32_t near = (bits ^ bits >> 6) & 0x00cc00ccu;
    bits ^= near ^ near << 6;
    const uint32_t far = (bits ^ bits >> 12) & 0x0000f0f0u;
    return bits ^ far ^ far << 12;
}

// 256 numbers of six bits, low nibbles and then upper pairs of bits in Q6_K's order, as words of four columns: three
// words of six-bit bytes carry a fourth in their upper pairs of bits, its highest pair in the first.
void pack_six_bits(const uint8_t* source, uint32_t* out) {
    constexpr uint32_t kNibbles = 0x0f0f0f0fu, kPairs = 0x03030303u;
    uint32_t low[32], high[16], numbers[64];
    std::memcpy(low, source, sizeof low);
    std::memcpy(high, source + sizeof low, sizeof high);
    for (int group = 0; group < 8; ++group) {  // of 32 columns
        const int half = group / 4, part = group % 4;
        for (int i = 0; i < 8; ++i) {
            const uint32_t nibbles = low[16 * half + part % 2 * 8 + i] >> (part / 2 * 4) & kNibbles;
            numbers[8 * group + i] = nibbles | (high[8 * half + i] >> (2 * part) & kPairs) << 4;
        }
    }
    for (int i = 0; i < 16; ++i) {
        const uint32_t* const four = numbers + 4 * i;
        for (int j = 0; j < 3; ++j) out[3 * i + j] = four[j] | (four[3] >> (4 - 2 * j) & kPairs) << 6;
    }
}

template <typename T>
void transpose(const uint8_t* source, int64_t stride, int rows, int count, uint8_t* out) {
    for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < count; ++i) {
            std::memcpy(out + sizeof(T) * (16 * i + r), source + r * stride + sizeof(T) * i, sizeof(T));
        }
    }
}

// What becomes of a field of a grid in one row: words, then four bits for each mask, then words.
struct Split {
    int words = 0, fours = 0, back = 0;
    uint32_t word[8], back_word[2] = {};
    uint8_t four[80];

    void put_bits(uint32_t bits, int count) {
        for (int i = 0; i < count; i += 4) four[fours++] = static_cast<uint8_t>(bits >> i & 15);
    }
    // Four times seven signs and a scale, `index` counting them.
    void put_sevens(uint32_t sevens, int index) {
        for (int i = 0; i < 4; ++i) put_bits(complete_signs(sevens >> (7 * i) & 127), 8);
        back_word[0] |= (sevens >> 28) << (4 * index);
        back = 1;
    }
    // Bit `plane` of numbers of `bits` bits, of each of four.
    void put_plane(uint32_t numbers, int bits, int plane) {
        uint32_t one = 0;
        for (int i = 0; i < 4; ++i) one |= (numbers >> (bits * i + plane) & 1) << i;
        put_bits(one, 4);
    }
};

Split split_field(const Field& field, const uint8_t* from) {
    Split split;
    uint32_t source[16];
    std::memcpy(source, from, 4 * size_t{field.count});
    const auto half = [&](int i) { return source[i / 2] >> (16 * (i % 2)) & 0xffff; };
    switch (field.kind) {
        case FieldKind::masks:
            for (int i = 0; i < field.count; ++i) split.put_bits(source[i], 32);
            break;
        case FieldKind::sign_sevens:
            for (int i = 0; i < field.count; ++i) split.put_sevens(source[i], i);
            break;
        case FieldKind::index_sevens:
            for (int i = 0; i < field.count; i += 2) {
                split.word[split.words++] = source[i];
                split.put_sevens(source[i + 1], i / 2);
            }
            break;
        case FieldKind::index_nines:
            for (int i = 0; i < 2 * field.count; i += 4) {
                uint32_t indices = 0, ninths = 0;
                for (int j = 0; j < 4; ++j) {
                    indices |= (half(i + j) & 255) << (8 * j);
                    ninths |= (half(i + j) >> 8 & 1) << j;
                }
                split.word[split.words++] = indices;
                split.put_bits(ninths, 4);
            }
            for (int i = 0; i < 2 * field.count; ++i) split.put_bits(complete_signs(half(i) >> 9), 8);
            break;
        case FieldKind::high_pairs:
            for (int i = 0; i < 16; ++i) split.put_plane(source[i / 8] >> (8 * (i / 2 % 4)) & 255, 2, i % 2);
            for (int i = 2; i < field.count; ++i) split.back_word[split.back++] = source[i];
            break;
        case FieldKind::high_threes:
            for (int i = 0; i < 2 * field.count; ++i) {
                for (int plane = 0; plane < 3; ++plane) split.put_plane(half(i), 3, plane);
                split.back_word[0] |= (half(i) >> 12) << (4 * i);
            }
            split.back = 1;
            break;
        default:
            for (int i = 0; i < 2 * field.count; ++i) {
                for (int plane = 0; plane < 4; ++plane) split.put_plane(half(i), 4, plane);
            }
    }
    return split;
}

// A field of a grid; returns what is behind it in the unit.
uint8_t* repack_split(const Field& field, const uint8_t* from, int64_t stride, int rows, uint8_t* out) {
    uint64_t masks[80] = {};
    Split split;
    for (int r = 0; r < rows; ++r) {
        split = split_field(field, from + r * stride);
        uint8_t* const back = out + 64 * split.words + 8 * split.fours + 4 * r;
        for (int i = 0; i < split.words; ++i) std::memcpy(out + 64 * i + 4 * r, split.word + i, 4);
        for (int i = 0; i < split.fours; ++i) masks[i] |= uint64_t{split.four[i]} << (4 * r);
        for (int i = 0; i < split.back; ++i) std::memcpy(back + 64 * i, split.back_word + i, 4);
    }
    std::memcpy(out + 64 * split.words, masks, 8 * static_cast<size_t>(split.fours));
    return out + 64 * (split.words + split.back) + 8 * split.fours;
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
            case FieldKind::two_bits:
                for (int i = 0; i < rows * field.count; ++i) {
                    const int r = i / field.count, at = i % field.count;
                    uint32_t bits;
                    std::memcpy(&bits, from + r * stride + 4 * at, sizeof bits);
                    bits = field.kind == FieldKind::two_bits ? exchange_two_bits(bits) : spread_fifth_bits(bits);
                    std::memcpy(out + 64 * at + 4 * r, &bits, sizeof bits);
                }
                out += 64 * field.count;
                break;
            case FieldKind::six_bits:
                for (int r = 0; r < rows; ++r) {
                    uint32_t packed[48];
                    pack_six_bits(from + r * stride, packed);
                    for (int i = 0; i < 48; ++i) std::memcpy(out + 64 * i + 4 * r, packed + i, 4);
                }
                out += 64 * field.count;
                break;
            default:
                out = repack_split(field, from, stride, rows, out);
        }
    }
}

// A block of halves, of which `count` are there, to an exponent and integers that are multiplied with
// 2**(exponent - 24), the step of f16's subnormal numbers at least. The largest magnitude gets 14 bits, so values down
// to an eighth of its power of two are exact, and others rounded to nearest even. Of infinity or not-a-number come
// zeros with an exponent that makes the sums of the row infinite.
void fix_halves(const uint8_t* source, int64_t count, uint8_t* block) {
    constexpr int kSpecial = 31, kLowest = 4, kBias = 127;
    uint8_t& exponent = block[0];
    uint8_t* const integers = block + 1;
    int16_t halves[kFixedColumns], largest = 0;
    if (count >= kFixedColumns) {
        std::memcpy(halves, source, sizeof halves);
    } else {
        std::memset(halves, 0, sizeof halves);
        for (int64_t i = 0; i < count; ++i) std::memcpy(halves + i, source + 2 * i, 2);
    }
    for (const int16_t half : halves) largest = std::max<int16_t>(largest, half & 0x7fff);
    const int top = largest >> 10;
    if (top == kSpecial) {
        std::memset(integers, 0, sizeof halves);
        exponent = 255;
        return;
    }
    exponent = static_cast<uint8_t>(std::max(top - kLowest, 0));
    const float per_unit = std::bit_cast<float>(static_cast<uint32_t>(24 - exponent + kBias) << 23);
    for (int i = 0; i < kFixedColumns; ++i) {
        const uint32_t half = static_cast<uint16_t>(halves[i]);
        const float magnitude = std::bit_cast<float>((half & 0x7fffu) << 13) * 0x1p112f;  // exact
        // Adding 1.5*2**23 leaves the integer, rounded to nearest even, in the low bits.
        const float value =
            std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude * per_unit) | (half & 0x8000u) << 16);
        halves[i] = static_cast<int16_t>(std::bit_cast<uint32_t>(value + 12582912.0f));
    }
    std::memcpy(integers, halves, sizeof halves);
}

// 16 rows of f16, or `rows`, `columns` halves apart.
void repack_halves(const uint8_t* source, int rows, int64_t columns, uint8_t* out) {
    uint8_t blocks[kRepackRows * kFixedBlockBytes];
    for (int64_t first = 0; first < columns; first += kFixedColumns, out += unit_bytes(Type::f16)) {
        for (int r = 0; r < rows; ++r) {
            fix_halves(source + 2 * (r * columns + first), columns - first, blocks + r * kFixedBlockBytes);
        }
        repack_unit(layout_of(Type::f16), blocks, kFixedBlockBytes, rows, out);
    }
}

// A block of E4M3 as unpack.h has it: (8 + f) * 2**(e - 5) times the step, which has the factor 2**24. The largest e is
// 15; numbers below half of what e = 1 has are zeros. Of what is no number comes a step that is none.
void recode_float8(const uint8_t* source, uint8_t* block) {
    constexpr int kPlaces[4] = {0, 2, 1, 3}, kTop = 15, kNone = -128;
    struct Parts {
        int exponent, fraction;
    };
    const auto split = [](int code) {
        if (code == 0) return Parts{kNone, 0};
        if (code >= 8) return Parts{code >> 3, code & 7};
        const int places = std::countl_zero(static_cast<uint8_t>(code)) - 4;
        return Parts{1 - places, code << places & 7};
    };
    static const auto kParts = [&] {
        std::array<Parts, 128> parts;
        for (int code = 0; code < 128; ++code) parts[static_cast<size_t>(code)] = split(code);
        return parts;
    }();
    float step;
    std::memcpy(&step, source, sizeof step);
    source += sizeof step;
    int top = kNone, largest = 0;
    for (int i = 0; i < kFixedColumns; ++i) {
        const int code = source[i] & 127;
        largest = std::max(largest, code);
    }
    if (largest > 0) top = kParts[static_cast<size_t>(largest)].exponent;
    step *= std::bit_cast<float>(static_cast<uint32_t>(largest > 0 ? top + 4 + 127 : 127) << 23);
    if (largest == 127) step = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(block, &step, sizeof step);
    for (int i = 0; i < kFixedColumns; ++i) {
        const Parts& parts = kParts[source[i] & 127];
        const int exponent = parts.exponent == kNone ? 0 : std::max(parts.exponent + kTop - top, 0);
        block[sizeof step + static_cast<size_t>(i / 4 * 4 + kPlaces[i % 4])] =
            static_cast<uint8_t>(exponent == 0 ? 0 : exponent << 4 | source[i] >> 7 << 3 | parts.fraction);
    }
}

// A unit of such blocks, `stride` bytes apart.
void repack_float8(const uint8_t* source, int64_t stride, int rows, uint8_t* out) {
    constexpr int kBytes = sizeof(float) + kFixedColumns;
    uint8_t blocks[kRepackRows * kBytes];
    for (int r = 0; r < rows; ++r) recode_float8(source + r * stride, blocks + r * kBytes);
    repack_unit(layout_of(Type::f8_e4m3_128), blocks, kBytes, rows, out);
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

// Reads bytes in their order into the cache. Rows that are read side by side are more streams than processors follow.
void read_ahead(const uint8_t* source, int64_t bytes) {
    constexpr int64_t kLine = 64, kMost = 256 << 10;
    for (int64_t at = 0; at < std::min(bytes, kMost); at += kLine) {
        (void)*static_cast<const volatile uint8_t*>(source + at);
    }
}

}  // namespace

int64_t block_rows(Type type) {
    return is_dense(type) ? kDenseRows : kRepackRows;
}

int64_t block_bytes(Type type, int64_t columns) {
    const TypeInfo& info = type_info(type);
    if (type == Type::bf16) return kDenseRows * ((columns + 1) / 2) * 4;
    if (type == Type::f32) return kDenseRows * columns * info.block_bytes;
    if (type == Type::f16) return (columns + kFixedColumns - 1) / kFixedColumns * unit_bytes(type);
    return columns / info.block_elements * unit_bytes(type);
}

void repack_block(Type type, const uint8_t* source, int64_t rows, int64_t columns, int64_t block, uint8_t* out) {
    const TypeInfo& info = type_info(type);
    const int64_t units = columns / info.block_elements, stride = units * info.block_bytes;
    const int64_t first = block * block_rows(type);
    const int valid = static_cast<int>(std::min(block_rows(type), rows - first));
    source += first * stride;
    read_ahead(source, valid * stride);
    if (type == Type::f32) {
        repack_dense<uint32_t>(source, valid, columns, out);
    } else if (type == Type::bf16) {
        if (columns % 2 == 0) return repack_dense<uint32_t>(source, valid, columns / 2, out);  // a pair is a word
        repack_pairs(source, valid, columns, out);
    } else if (type == Type::f16) {
        repack_halves(source, valid, columns, out);
    } else {
        for (int64_t u = 0; u < units; ++u) {
            const uint8_t* const from = source + u * info.block_bytes;
            uint8_t* const to = out + u * unit_bytes(type);
            if (type == Type::f8_e4m3_128) {
                repack_float8(from, stride, valid, to);
            } else {
                repack_unit(layout_of(type), from, stride, valid, to);
            }
        }
    }
}

const uint8_t* repack_blocks(Type type, const uint8_t* source, int rows, uint8_t* out) {
    const int bytes = type_info(type).block_bytes;
    std::memset(out, 0, static_cast<size_t>(unit_bytes(type)));
    repack_unit(layout_of(type), source, bytes, rows, out);
    return source + rows * bytes;
}

}  // namespace mlxr
