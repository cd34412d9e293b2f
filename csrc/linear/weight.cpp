// Weights: checks and repacking. See linear.h.
#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "linear/linear.h"
#include "linear/repack.h"

namespace mlxr {

namespace {

// 32-bit sums of a row's groups stay exact for any length; this bounds sizes so that no product of them
// overflows.
constexpr int64_t kMaxFeatures = int64_t{1} << 28;

std::string text(int64_t value) {
    return std::to_string(value);
}

}  // namespace

LinearWeight::LinearWeight(int64_t in_features) : in_features_(in_features) {
    if (in_features < 1 || in_features > kMaxFeatures) {
        throw std::invalid_argument("linear weight: in_features is " + text(in_features) + ", expected 1 to " +
                                    text(kMaxFeatures));
    }
}

void LinearWeight::check(Type type, int64_t rows, size_t bytes) const {
    const TypeInfo& info = type_info(type);
    if (in_features_ % info.block_elements != 0) {
        throw std::invalid_argument("linear weight: in_features is " + text(in_features_) + ", which " + info.name +
                                    " needs to be a multiple of " + text(info.block_elements));
    }
    if (rows < 1 || rows > kMaxFeatures) {
        throw std::invalid_argument("linear weight: out_features is " + text(rows) + ", expected 1 to " +
                                    text(kMaxFeatures));
    }
    const int64_t expected = rows * (in_features_ / info.block_elements * info.block_bytes);
    if (std::cmp_not_equal(bytes, expected)) {
        throw std::invalid_argument("linear weight: data has " + std::to_string(bytes) + " bytes, " + text(rows) +
                                    " x " + text(in_features_) + " of " + info.name + " need " + text(expected));
    }
}

LinearWeight::Part LinearWeight::repack(Runtime& runtime, Type type, int64_t rows, const uint8_t* data,
                                        const float* bias) const {
    Part part;
    part.type = type;
    part.rows = rows;
    part.first_column = 0;
    part.blocks = (rows + block_rows(type) - 1) / block_rows(type);
    part.block_bytes = block_bytes(type, in_features_);
    part.memory = runtime.weights.take(static_cast<size_t>(part.blocks * part.block_bytes));
    if (bias != nullptr) part.bias.assign(bias, bias + rows);
    // Tasks of about half a megabyte: enough to share, few enough to keep each thread in one place of the
    // file.
    const int64_t step = std::max<int64_t>(1, (int64_t{1} << 19) / part.block_bytes);
    const int64_t tasks = (part.blocks + step - 1) / step;
    runtime.pool.parallel_for(static_cast<int>(tasks), [&](int task, int) {
        const int64_t last = std::min<int64_t>(part.blocks, (task + 1) * step);
        for (int64_t block = task * step; block < last; ++block) {
            repack_block(type, data, rows, in_features_, block, part.memory.data() + block * part.block_bytes);
        }
    });
    return part;
}

void LinearWeight::append(Part part) {
    part.first_column = out_features_;
    out_features_ += part.rows;
    parts_.push_back(std::move(part));
}

int64_t LinearWeight::bytes() const {
    int64_t bytes = 0;
    for (const Part& part : parts_) {
        bytes += static_cast<int64_t>(part.memory.bytes() + part.bias.size() * sizeof(float));
    }
    return bytes;
}

}  // namespace mlxr
