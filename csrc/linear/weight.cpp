// Weights: checks and repacking. See linear.h.
#include <algorithm>
#include <atomic>
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

std::atomic<int64_t> made{0};  // weights so far

std::string text(int64_t value) {
    return std::to_string(value);
}

int64_t whole_lines(int64_t bytes) {
    return (bytes + 63) / 64 * 64;
}

// Blocks [first, last) of a part.
struct Run {
    const LinearWeight::Part* part;
    const uint8_t* source;
    int64_t columns, first, last;
};

// Appends runs of about half a megabyte: enough to share, few enough to keep each thread in one place of the file.
void cut_runs(const LinearWeight::Part& part, const uint8_t* source, int64_t columns, std::vector<Run>& runs) {
    const int64_t step = std::max<int64_t>(1, (int64_t{1} << 19) / part.block_bytes);
    for (int64_t first = 0; first < part.blocks; first += step) {
        runs.push_back({&part, source, columns, first, std::min(part.blocks, first + step)});
    }
}

void repack_runs(Runtime& runtime, const std::vector<Run>& runs) {
    runtime.pool.parallel_for(static_cast<int>(runs.size()), [&](int task, int) {
        const Run& run = runs[static_cast<size_t>(task)];
        const LinearWeight::Part& part = *run.part;
        for (int64_t block = run.first; block < run.last; ++block) {
            repack_block(part.type, run.source, part.rows, run.columns, block,
                         part.memory.data() + block * part.block_bytes);
        }
    });
}

}  // namespace

LinearWeight::LinearWeight(int64_t in_features) : in_features_(in_features), number_(made.fetch_add(1)) {
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

LinearWeight::Part LinearWeight::describe(Type type, int64_t rows, const float* bias) const {
    Part part;
    part.type = type;
    part.rows = rows;
    part.first_column = 0;
    part.blocks = (rows + block_rows(type) - 1) / block_rows(type);
    part.block_bytes = block_bytes(type, in_features_);
    if (bias != nullptr) part.bias.assign(bias, bias + rows);
    return part;
}

LinearWeight::Part LinearWeight::repack(Runtime& runtime, Type type, int64_t rows, const uint8_t* data,
                                        const float* bias) const {
    Part part = describe(type, rows, bias);
    part.memory = runtime.weights.take(static_cast<size_t>(part.blocks * part.block_bytes));
    std::vector<Run> runs;
    cut_runs(part, data, in_features_, runs);
    repack_runs(runtime, runs);
    return part;
}

LinearWeight::Part LinearWeight::leave(Type type, int64_t rows, const uint8_t* data, size_t bytes,
                                       const float* bias) const {
    Part part = describe(type, rows, bias);
    part.source = data;
    part.source_bytes = bytes;
    return part;
}

bool LinearWeight::is_loaded() const {
    return std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.memory.data() != nullptr; });
}

int64_t LinearWeight::room() const {
    int64_t bytes = 0;
    for (const Part& part : parts_) bytes += whole_lines(part.blocks * part.block_bytes);
    return bytes;
}

void LinearWeight::load(const Slice& memory) {
    int64_t first = 0;
    for (Part& part : parts_) {
        const int64_t bytes = part.blocks * part.block_bytes;
        part.memory = memory.cut(static_cast<size_t>(first), static_cast<size_t>(bytes));
        first += whole_lines(bytes);
    }
}

void LinearWeight::unload() {
    for (Part& part : parts_) part.memory = Slice();
}

void repack_parts(Runtime& runtime, std::span<const LinearWeight* const> weights) {
    std::vector<Run> runs;
    for (const LinearWeight* const weight : weights) {
        for (const LinearWeight::Part& part : weight->parts()) expect_file(part.source, part.source_bytes);
    }
    for (const LinearWeight* const weight : weights) {
        for (const LinearWeight::Part& part : weight->parts()) {
            cut_runs(part, part.source, weight->in_features(), runs);
        }
    }
    repack_runs(runtime, runs);
    for (const LinearWeight* const weight : weights) {
        for (const LinearWeight::Part& part : weight->parts()) release_file(part.source, part.source_bytes);
    }
}

void LinearWeight::append(Part part) {
    part.first_column = out_features_;
    out_features_ += part.rows;
    parts_.push_back(std::move(part));
}

int64_t LinearWeight::bytes() const {
    int64_t bytes = 0;
    for (const Part& part : parts_) {
        bytes += part.blocks * part.block_bytes + static_cast<int64_t>(part.bias.size() * sizeof(float));
    }
    return bytes;
}

}  // namespace mlxr
