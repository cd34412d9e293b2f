// One or several weights that share their input, and their product with tokens. Decides which kernels run on
// which share of the rows; the sums themselves, and so the bits, do not depend on any of that.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "linear/pages.h"
#include "operators/operator_table.h"
#include "quants/quants.h"
#include "runtime/runtime.h"

namespace mlxr {

class LinearWeight {
  public:
    // One weight of the group: `rows` output features at columns first_column.. of the result.
    struct Part {
        Type type;
        int64_t rows, first_column;
        int64_t blocks, block_bytes;
        Slice memory;                     // repacked blocks, or nothing while they stay in their file
        std::vector<float> bias;          // rows values, or empty
        const uint8_t* source = nullptr;  // raw blocks in a mapped file, where the part may be loaded again
        size_t source_bytes = 0;
    };

    // Throws std::invalid_argument when in_features is below 1.
    explicit LinearWeight(int64_t in_features);
    LinearWeight(const LinearWeight&) = delete;
    LinearWeight& operator=(const LinearWeight&) = delete;

    // Checks a weight before it is repacked: that its type allows in_features and that `bytes` bytes are its
    // rows. Throws std::invalid_argument.
    void check(Type type, int64_t rows, size_t bytes) const;

    // Repacks rows * in_features weights from raw blocks, on the runtime's threads (whose mutex the caller
    // holds). `bias` is null or has `rows` values.
    Part repack(Runtime& runtime, Type type, int64_t rows, const uint8_t* data, const float* bias) const;

    // The same of raw blocks in a mapped file, where they stay: repacked by `load` only.
    Part leave(Type type, int64_t rows, const uint8_t* data, size_t bytes, const float* bias) const;

    void append(Part part);

    // Whether all parts are in memory.
    bool is_loaded() const;

    // Bytes of all blocks, each part in whole cache lines.
    int64_t room() const;

    // Gives parts that were left in their file `memory` of `room()` bytes, which is zeros or was that of a weight of
    // the same parts; their blocks are repacked by `repack_parts`. Then they are loaded, until they are unloaded.
    void load(const Slice& memory);
    void unload();

    int64_t in_features() const { return in_features_; }
    int64_t out_features() const { return out_features_; }
    int64_t bytes() const;  // of its parts, when they are in memory
    const std::vector<Part>& parts() const { return parts_; }

    // That of no other weight; those that are made one after another have numbers that follow one another.
    int64_t number() const { return number_; }

  private:
    Part describe(Type type, int64_t rows, const float* bias) const;

    int64_t in_features_, out_features_ = 0, number_;
    std::vector<Part> parts_;
};

// Repacks the blocks of all parts of weights that were left in their file and have memory now, on the runtime's
// threads, and lets the file's pages go. The caller holds the runtime's mutex.
void repack_parts(Runtime& runtime, std::span<const LinearWeight* const> weights);

// What makes rows [first, last) of x. Called for every row once before x is read, from any thread of the pool: it must
// not start a section of the pool, nor throw.
using MakeRows = std::function<void(int64_t first, int64_t last)>;

// Other work of a product's threads, with the same x: `run` is called for each share in [0, shares), at most as many as
// there are threads, by any of them, when x is made.
struct Beside {
    int shares;
    std::function<void(int share)> run;
};

// out[t][:] = weight * x[t] + bias for `tokens` rows; x has in_features columns, out out_features, both
// contiguous. The caller holds the runtime's mutex. Throws std::bad_alloc.
void multiply(Runtime& runtime, const LinearWeight& weight, const float* x, int64_t tokens, float* out,
              const MakeRows& make_rows = nullptr, const Beside* beside = nullptr);

// Products of parts of rows: part i of a token's row has in_features numbers, which weight i multiplies, and `passed`
// more, which stand before the result of the part. All weights have one shape.
struct PartsProduct {
    std::span<const LinearWeight* const> weights;
    const float* x;  // (tokens, parts, in_features + passed)
    float* out;      // (tokens, parts, passed + out_features)
    int64_t tokens, passed;
};

// The caller holds the runtime's mutex. Throws std::bad_alloc.
void multiply_parts(Runtime& runtime, const PartsProduct& product);

// Whether multiply_gated serves these weights and so many tokens: many, all weights quantised, 32 columns at a time.
bool can_multiply_gated(const LinearWeight& gate_up, const LinearWeight& down, int64_t tokens);

// out = down * (act(gate * x) * (up * x)), with the bits of the three steps one after another; gate_up is two weights.
// make_rows as in multiply. The caller holds the runtime's mutex. Throws std::bad_alloc.
void multiply_gated(Runtime& runtime, const LinearWeight& gate_up, const float* x, int64_t tokens, Activation kind,
                    const ActivationParameters& parameters, const LinearWeight& down, float* out,
                    const MakeRows& make_rows);

}  // namespace mlxr
