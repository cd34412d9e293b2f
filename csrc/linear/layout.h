// How repacked weights lie in memory; shared by the repacking code and the kernels of every tier.
//
// A block is 16 output rows and all columns; it is a sequence of units, one per source block of the type (32
// to 256 columns). A unit holds the fields of its 16 source blocks, field by field: 32-bit word i of row r at
// lane r of vector i (64 bytes), 16-bit fields as 16 halves (32 bytes), 8-bit fields as 16 bytes. No field is
// changed but the fifth bits of Q5_0 and Q5_1, whose order suits a shift and a mask here, those of Q1_0 and Q2_0, and
// Q6_K's numbers of six bits, which the file keeps as four and two; so the repacked weight is as large as the file's,
// and exactly the file's. Rows past the end are zero.
//
// f16 is turned into blocks of 128 columns first: a byte, the exponent, and 128 signed 16-bit integers, which are
// multiplied with 2**(exponent - 24) (repack.cpp). The last block of a row is filled up with zeros.
// Blocks of E4M3 are recoded: their scale is that of the largest exponent, and a byte has its own in relation to that.
//
// f32 and bf16 lie in blocks of 32 rows: f32 for each column the 32 values, bf16 for each pair of columns a word of
// each.
#pragma once

#include "quants/quants.h"

namespace mlxr {

enum class FieldKind : uint8_t {
    words,       // `count` 32-bit words
    halves,      // `count` 16-bit values
    bytes,       // `count` 8-bit values
    fifth_bits,  // words: bit 4*i+b of the source to bit 8*b+i, so that i selects the element word, b its
                 // byte
    two_bits,    // words: bits 8*i+2*b of the source to bits 8*b+2*i, likewise
    six_bits,    // 48 words of 256 numbers: see pack_six_bits
    // Of grids (grids.h). A mask is a word of 64 bits, four of each row, that of row r from bit 4 r on.
    masks,         // `count` words of bits: a mask for each four of them
    sign_sevens,   // words of four times seven signs and a scale of four bits: masks of all signs, a word of scales
    index_sevens,  // the same behind each word of four indices, which come first
    index_nines,   // 16 bits: nine of an index, seven signs. Words of four indices, masks of their ninth bits, of all
                   // signs
    high_pairs,    // two words of upper bits of four indices a byte, two masks for each byte; then words
    high_threes,   // 16 bits: three of four indices, and four. Three masks each; a word of all fours
    high_fours,    // a mask for each bit of four indices, four masks for each 16 bits
};

// Signs that a file has of seven columns of eight: an even number of them is negative.
static constexpr uint32_t complete_signs(uint32_t sevens) {
    return sevens | static_cast<uint32_t>(__builtin_popcount(sevens) & 1) << 7;
}

struct Field {
    FieldKind kind;
    uint8_t offset;  // in the source block, bytes
    uint8_t count;
};

inline constexpr int kMaxFields = 4;

struct Layout {
    Field fields[kMaxFields];  // in the unit's order; count 0 ends
};

using enum FieldKind;
inline constexpr Layout kLayouts[] = {
#define TYPE(name, code, columns, bytes, ...) {{__VA_ARGS__}},
#include "tables/types.def"
};

// f16's blocks.
inline constexpr int kFixedColumns = 128, kFixedBlockBytes = 1 + 2 * kFixedColumns;

static constexpr const Layout& layout_of(Type type) {
    return kLayouts[static_cast<int>(type)];
}

// Bytes of one unit (16 rows of one source block).
static constexpr int unit_bytes(Type type) {
    int bytes = 0;
    for (const Field& field : layout_of(type).fields) {
        const FieldKind kind = field.kind;
        const bool completes = kind == sign_sevens || kind == index_sevens || kind == index_nines;
        bytes += 16 * (kind == FieldKind::bytes ? 1 : kind == halves ? 2 : 4) * (field.count + (completes ? 1 : 0));
    }
    return bytes;
}

}  // namespace mlxr
