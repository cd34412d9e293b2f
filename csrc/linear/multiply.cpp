// The product: quantise the activations once, then share out the rows. Few tokens; for many see panels.cpp.
#include <algorithm>
#include <atomic>
#include <cstddef>

#include "linear/call.h"

namespace mlxr {

namespace {

using Part = LinearWeight::Part;

// From so many tokens on arithmetic bounds a product rather than memory: rows are shared out in small pieces.
constexpr int64_t kSomeTokens = 32;
// Few tokens: shares of a weight that are left for whoever is free first.
constexpr int kSpareTasks = 8;
constexpr int64_t kSpareFraction = 10;  // one tenth of the bytes
// Less than this takes one thread no longer than starting the others.
constexpr int64_t kSmallBytes = 32768;
// Up to so many values one thread makes and quantises the input, while the others ask for weights.
constexpr int64_t kAloneValues = 16384;
// What a waiting thread asks for: it must fit into its second-level cache.
constexpr int64_t kFetchBytes = 256 << 10;

}  // namespace

void lay_out_activations(LinearCall& call, Scratch use) {
    bool needed[kZeroPointCount] = {}, any = false;
    for (const Part& part : call.weight.parts()) {
        if (is_dense(part.type)) continue;
        any = true;
        const int zero = kernels_of(call, part.type).zero_point;
        if (zero >= 0) needed[zero] = true;
    }
    if (!any) return;
    Activations& a = call.activations;
    const int64_t columns = call.weight.in_features();
    a.groups = columns / kGroupColumns;
    a.tile = call.tokens < kManyTokens ? call.tokens : kTileTokens;
    const int64_t items = (call.tokens + a.tile - 1) / a.tile * a.tile * a.groups;
    const int64_t per_group = align_line(4 * items), per_half = align_line(8 * items),
                  values = align_line(kGroupColumns * items);
    int64_t bytes = values + 2 * per_group + per_half;
    for (int z = 0; z < kZeroPointCount; ++z) {
        if (needed[z]) bytes += kZeroPoints[z].halves ? per_half : per_group;
    }
    std::byte* at = call.runtime.scratch(use, static_cast<size_t>(bytes));
    const auto take = [&](int64_t size) {
        std::byte* const taken = at;
        at += size;
        return taken;
    };
    a.values = reinterpret_cast<int8_t*>(take(values));
    a.scales = reinterpret_cast<float*>(take(per_group));
    a.scaled_sums = reinterpret_cast<float*>(take(per_group));
    a.half_sums = reinterpret_cast<int32_t*>(take(per_half));
    for (int z = 0; z < kZeroPointCount; ++z) {
        const int64_t size = kZeroPoints[z].halves ? per_half : per_group;
        a.zeros[z] = needed[z] ? reinterpret_cast<int32_t*>(take(size)) : nullptr;
    }
}

namespace {

bool is_quantized(const LinearCall& call) {
    return call.activations.values != nullptr;
}

// Tokens [first, last) of the input.
void quantize_tokens(const LinearCall& call, int64_t first, int64_t last) {
    const int64_t columns = call.weight.in_features();
    call.runtime.kernels->quantize({.x = call.x + first * columns,
                                    .x_stride = columns,
                                    .first_token = first,
                                    .last_token = last,
                                    .first_group = 0,
                                    .last_group = call.activations.groups,
                                    .activations = &call.activations});
}

// The input, made and quantised by this thread alone.
void prepare_alone(const LinearCall& call, const MakeRows& make_rows) {
    if (make_rows) make_rows(0, call.tokens);
    if (is_quantized(call)) quantize_tokens(call, 0, call.tokens);
}

}  // namespace

void prepare_together(const LinearCall& call, const MakeRows& make_rows) {
    if (!make_rows && !is_quantized(call)) return;
    const int threads = call.runtime.pool.threads();
    const int64_t tile = std::min(kTileTokens, (call.tokens + threads - 1) / threads);
    const int64_t tiles = (call.tokens + tile - 1) / tile;
    const int tasks = static_cast<int>(std::min<int64_t>(tiles, 1024));
    call.runtime.pool.parallel_for_static(tasks, [&](int task, int) {
        const int64_t end = std::min(call.tokens, tiles * (task + 1) / tasks * tile);
        for (int64_t first = tiles * task / tasks * tile; first < end; first += tile) {
            const int64_t last = std::min(first + tile, end);
            if (make_rows) make_rows(first, last);
            if (is_quantized(call)) quantize_tokens(call, first, last);  // while they are in the cache
        }
    });
}

void multiply_blocks(const LinearCall& call, const Part& part, int64_t first, int64_t last) {
    float* const out = call.out + part.first_column;
    const int64_t stride = call.weight.out_features(), columns = call.weight.in_features();
    if (is_dense(part.type)) {
        call.runtime.kernels->dense[static_cast<int>(part.type)]({.weights = part.memory.data(),
                                                                  .columns = columns,
                                                                  .first_block = first,
                                                                  .last_block = last,
                                                                  .rows = part.rows,
                                                                  .x = call.x,
                                                                  .tokens = call.tokens,
                                                                  .out = out,
                                                                  .out_stride = stride,
                                                                  .bias = bias_of(part)});
        return;
    }
    const QuantKernels& kernels = kernels_of(call, part.type);
    kernels.rows({.weights = part.memory.data(),
                  .units = columns / kernels.unit_columns,
                  .first_block = first,
                  .last_block = last,
                  .rows = part.rows,
                  .activations = &call.activations,
                  .tokens = call.tokens,
                  .out = out,
                  .out_stride = stride,
                  .bias = bias_of(part)});
}

namespace {

// The bytes [first, last) of all parts, one after another; a block belongs to where it begins.
void multiply_bytes(const LinearCall& call, int64_t first, int64_t last) {
    int64_t begin = 0;
    for (const Part& part : call.weight.parts()) {
        const auto block_at = [&](int64_t byte) {
            return std::clamp<int64_t>((byte - begin + part.block_bytes - 1) / part.block_bytes, 0, part.blocks);
        };
        const int64_t first_block = first <= begin ? 0 : block_at(first),
                      last_block = last <= begin ? 0 : block_at(last);
        if (first_block < last_block) multiply_blocks(call, part, first_block, last_block);
        begin += part.blocks * part.block_bytes;
    }
}

// Asks for the first bytes of [first, last) of all parts, until the input is ready, and waits for it.
void fetch_until_ready(const LinearCall& call, int64_t first, int64_t last, const std::atomic<bool>& ready) {
    constexpr int64_t kLine = 64, kStep = 2048;
    last = std::min(last, first + kFetchBytes);
    int64_t begin = 0;
    for (const Part& part : call.weight.parts()) {
        const int64_t bytes = part.blocks * part.block_bytes;
        int64_t at = std::max<int64_t>(first - begin, 0);
        for (const int64_t end = std::min(last - begin, bytes); at < end; at += kStep) {
            if (ready.load(std::memory_order_acquire)) return;
            for (int64_t line = at; line < at + kStep; line += kLine)
                __builtin_prefetch(part.memory.data() + line, 0, 2);
        }
        begin += bytes;
    }
    wait_until([&] { return ready.load(std::memory_order_acquire); });
}

// Few tokens: bound by reading the weights. Each thread reads one contiguous run; a tenth is left in small
// pieces for the thread that is ahead. Little input is made by the calling thread, while the others begin to read.
void multiply_few(const LinearCall& call, const MakeRows& make_rows) {
    int64_t bytes = 0;
    for (const Part& part : call.weight.parts()) bytes += part.blocks * part.block_bytes;
    const int threads = call.runtime.pool.threads();
    if (threads == 1 || bytes * call.tokens < kSmallBytes) {
        prepare_alone(call, make_rows);
        return multiply_bytes(call, 0, bytes);
    }
    const bool alone = call.tokens * call.weight.in_features() < kAloneValues;
    if (!alone) prepare_together(call, make_rows);
    std::atomic<bool> ready{!alone};
    const int64_t shared = bytes - bytes / kSpareFraction;
    call.runtime.pool.parallel_for(threads + kSpareTasks, [&](int task, int thread) {
        const int64_t spare = task - threads;
        const int64_t first = spare < 0 ? shared * task / threads : shared + (bytes - shared) * spare / kSpareTasks;
        const int64_t last =
            spare < 0 ? shared * (task + 1) / threads : shared + (bytes - shared) * (spare + 1) / kSpareTasks;
        if (!ready.load(std::memory_order_acquire)) {
            if (thread == 0) {
                prepare_alone(call, make_rows);
                ready.store(true, std::memory_order_release);
            } else {
                fetch_until_ready(call, first, last, ready);
            }
        }
        multiply_bytes(call, first, last);
    });
}

}  // namespace

void multiply(Runtime& runtime, const LinearWeight& weight, const float* x, int64_t tokens, float* out,
              const MakeRows& make_rows) {
    if (tokens == 0 || weight.parts().empty()) return;
    LinearCall call{runtime, weight, x, tokens, out, {}};
    lay_out_activations(call, Scratch::activations);
    if (tokens < kSomeTokens) return multiply_few(call, make_rows);
    prepare_together(call, make_rows);
    multiply_many(call);
}

}  // namespace mlxr
