// How repacked weights lie in memory; shared by the repacking code and the kernels of every tier.
//
// A block is 16 output rows and all columns; it is a sequence of units, one per source block of the type (32
// to 256 columns). A unit holds the fields of its 16 source blocks, field by field: 32-bit word i of row r at
// lane r of vector i (64 bytes), 16-bit fields as 16 halves (32 bytes), 8-bit fields as 16 bytes. No field is
// changed but the fifth bits of Q5_0 and Q5_1, whose order suits a shift and a mask here, and Q6_K's numbers of six
// bits, which the file keeps as four and two; so the repacked weight is as large as the file's, and exactly the file's.
// Rows past the end are zero.
//
// f16 is turned into blocks of 128 columns first: a byte, the exponent, and 128 signed 16-bit integers, which are
// multiplied with 2**(exponent - 24) (repack.cpp). The last block of a row is filled up with zeros.
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
    fifth_bits,  // one word: bit 4*i+b of the source to bit 8*b+i, so that i selects the element word, b its
                 // byte
    six_bits,    // 48 words of 256 numbers: see pack_six_bits
};

struct Field {
    FieldKind kind;
    uint8_t offset;  // in the source block, bytes
    uint8_t count;
};

inline constexpr int kMaxFields = 4;

struct Layout {
    Field fields[kMaxFields];  // in the unit's order; count 0 ends
};

// In the order of Type, from q4_0 on.
// clang-format off
using enum FieldKind;
inline constexpr Layout kLayouts[] = {
    {{{words, 2, 4}, {halves, 0, 1}}},                                        // q4_0
    {{{words, 4, 4}, {halves, 0, 2}}},                                        // q4_1
    {{{words, 6, 4}, {fifth_bits, 2, 1}, {halves, 0, 1}}},                    // q5_0
    {{{words, 8, 4}, {fifth_bits, 4, 1}, {halves, 0, 2}}},                    // q5_1
    {{{words, 2, 8}, {halves, 0, 1}}},                                        // q8_0
    {{{words, 16, 16}, {words, 0, 4}, {halves, 80, 2}}},                      // q2_k
    {{{words, 32, 16}, {words, 0, 8}, {words, 96, 3}, {halves, 108, 1}}},     // q3_k
    {{{words, 16, 32}, {words, 4, 3}, {halves, 0, 2}}},                       // q4_k
    {{{words, 48, 32}, {words, 16, 8}, {words, 4, 3}, {halves, 0, 2}}},       // q5_k
    {{{six_bits, 0, 48}, {bytes, 192, 16}, {halves, 208, 1}}},                // q6_k
    {{{words, 4, 64}, {words, 0, 1}}},                                        // q8_k
    {{{words, 2, 4}, {halves, 0, 1}}},                                        // iq4_nl
    {{{words, 8, 32}, {words, 4, 1}, {halves, 0, 2}}},                        // iq4_xs
    {{{words, 1, 4}, {bytes, 0, 1}}},                                         // mxfp4
    {{{words, 8, 4}, {words, 0, 2}}},                                         // affine4_32
    {{{words, 8, 8}, {words, 0, 2}}},                                         // affine4_64
    {{{words, 8, 8}, {words, 0, 2}}},                                         // affine8_32
    {{{words, 8, 16}, {words, 0, 2}}},                                        // affine8_64
};
// clang-format on

inline constexpr Layout kFixedLayout = {{{words, 1, 64}, {bytes, 0, 1}}};  // f16
inline constexpr int kFixedColumns = 128, kFixedBlockBytes = 1 + 2 * kFixedColumns;

static constexpr const Layout& layout_of(Type type) {
    if (type == Type::f16) return kFixedLayout;
    return kLayouts[static_cast<int>(type) - static_cast<int>(Type::q4_0)];
}

// Bytes of one unit (16 rows of one source block).
static constexpr int unit_bytes(Type type) {
    int bytes = 0;
    for (const Field& field : layout_of(type).fields) {
        const int width = field.kind == FieldKind::bytes ? 1 : field.kind == FieldKind::halves ? 2 : 4;
        bytes += 16 * width * field.count;
    }
    return bytes;
}

}  // namespace mlxr
