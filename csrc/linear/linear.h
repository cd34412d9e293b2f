// One or several weights that share their input, and their product with tokens. Decides which kernels run on
// which share of the rows; the sums themselves, and so the bits, do not depend on any of that.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "linear/pages.h"
#include "quants.h"
#include "runtime.h"

namespace mlxr {

class LinearWeight {
  public:
    // One weight of the group: `rows` output features at columns first_column.. of the result.
    struct Part {
        Type type;
        int64_t rows, first_column;
        int64_t blocks, block_bytes;
        Pages memory;
        std::vector<float> bias;  // rows values, or empty
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

    void append(Part part);

    int64_t in_features() const { return in_features_; }
    int64_t out_features() const { return out_features_; }
    int64_t bytes() const;  // held in memory
    const std::vector<Part>& parts() const { return parts_; }

  private:
    int64_t in_features_, out_features_ = 0;
    std::vector<Part> parts_;
};

// What makes x, called once before x is read. With few tokens it is called on one thread while the others wait
// (alone = true: it must not start a section of the pool); else it may use the pool. Must not throw.
using MakeInput = std::function<void(bool alone)>;

// out[t][:] = weight * x[t] + bias for `tokens` rows; x has in_features columns, out out_features, both
// contiguous. The caller holds the runtime's mutex. Throws std::bad_alloc.
void multiply(Runtime& runtime, const LinearWeight& weight, const float* x, int64_t tokens, float* out,
              const MakeInput& make_input = nullptr);

}  // namespace mlxr
