// See hadamard.h.
#include "layers/hadamard.h"

#include <utility>

#include "runtime/ranges.h"

namespace mlxr {

namespace {

// Four neighbours, wherever they lie: what every processor has.
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
constexpr int64_t kFour = 4;

Four& at(float* v, int64_t i) {
    return *reinterpret_cast<Four*>(v + i);
}

// Sums and differences of numbers that stand 1 and then 2 apart.
void add_neighbours(float* v, int64_t count) {
    for (int64_t i = 0; i < count; i += kFour) {
        const float a = v[i] + v[i + 1], b = v[i] - v[i + 1], c = v[i + 2] + v[i + 3], d = v[i + 2] - v[i + 3];
        v[i] = a + c;
        v[i + 1] = b + d;
        v[i + 2] = a - c;
        v[i + 3] = b - d;
    }
}

// Those that stand `step` apart, and then twice as far.
void add_twice(float* v, int64_t count, int64_t step) {
    for (int64_t i = 0; i < count; i += 4 * step) {
        for (int64_t j = i; j < i + step; j += kFour) {
            Four &first = at(v, j), &second = at(v, j + step), &third = at(v, j + 2 * step),
                 &last = at(v, j + 3 * step);
            const Four a = first + second, b = first - second, c = third + last, d = third - last;
            first = a + c;
            second = b + d;
            third = a - c;
            last = b - d;
        }
    }
}

void add_once(float* v, int64_t count, int64_t step) {
    for (int64_t i = 0; i < count; i += 2 * step) {
        for (int64_t j = i; j < i + step; ++j) {
            const float a = v[j], b = v[j + step];
            v[j] = a + b;
            v[j + step] = a - b;
        }
    }
}

void add_apart(float* v, int64_t count) {
    int64_t step = 1;
    if (count >= kFour) {
        add_neighbours(v, count);
        step = kFour;
    }
    for (; 4 * step <= count; step *= 4) add_twice(v, count, step);
    if (step < count) add_once(v, count, step);
}

void rotate(const HadamardCall& call, int64_t block_first, int64_t block_last) {
    const int64_t blocks = call.columns / call.block;
    for (int64_t block = block_first; block < block_last; ++block) {
        const int64_t row = block / blocks * call.columns, first = block % blocks * call.block;
        const float* const x = call.x + row;
        float* const out = call.out + row + first;
        for (int64_t i = 0; i < call.block; ++i) {
            const float number = x[call.order != nullptr ? call.order[first + i] : first + i];
            out[i] = call.signs != nullptr && !call.inverse ? number * call.signs[first + i] : number;
        }
        add_apart(out, call.block);
        for (int64_t i = 0; i < call.block; ++i) {
            const float scaled = out[i] * call.scale;
            out[i] = call.signs != nullptr && call.inverse ? scaled * call.signs[first + i] : scaled;
        }
    }
}

constexpr int kHadamard = 2, kInverseHadamard = 3;  // forms of scale, see tally.cpp

// The ledger counts them among what scales rows.
Ran describe(KernelName kernel, const HadamardCall& call) {
    return {OperatorName::scale, kernel, call.inverse ? kInverseHadamard : kHadamard};
}

}  // namespace

void spread_hadamard(Runtime& runtime, const HadamardCall& call, int64_t rows) {
    Counted counted(runtime.tally, describe(KernelName::plain, call));
    counted.does([&] {
        const int64_t bytes = 2 * rows * call.columns * static_cast<int64_t>(sizeof(float));
        return Tally::Work{.nanoseconds = 0, .bytes = bytes, .macs = 0};
    });
    run_ranges(runtime, rows * (call.columns / call.block), 4 * call.block,
               [&](int64_t first, int64_t last) { rotate(call, first, last); });
}

MakeRows fuse_hadamard(Runtime& runtime, const HadamardCall& call, MakeRows make_x) {
    runtime.tally.count(describe(KernelName::fused, call));
    return [call, make_x = std::move(make_x)](int64_t first, int64_t last) {
        if (make_x != nullptr) make_x(first, last);
        const int64_t blocks = call.columns / call.block;
        rotate(call, first * blocks, last * blocks);
    };
}

}  // namespace mlxr
