// The product: quantise the activations once, then share out the rows. See linear.h.
#include <algorithm>
#include <atomic>
#include <cstddef>

#include "linear/linear.h"
#include "linear/repack.h"

namespace mlxr {

namespace {

using Part = LinearWeight::Part;

// From so many tokens on arithmetic bounds a product rather than memory: rows are shared out in small pieces.
constexpr int64_t kSomeTokens = 32;
// Groups in a panel at most: 128 of up to 1.8 KB stay in a second-level cache beside the activations.
constexpr int64_t kPanelGroups = 128;
// Few tokens: shares of a weight that are left for whoever is free first.
constexpr int kSpareTasks = 8;
constexpr int64_t kSpareFraction = 10;  // one tenth of the bytes
// Less than this takes one thread no longer than starting the others.
constexpr int64_t kSmallBytes = 32768;
// Up to so many values one thread makes and quantises the input, while the others ask for weights.
constexpr int64_t kAloneValues = 16384;
// What a waiting thread asks for: it must fit into its second-level cache.
constexpr int64_t kFetchBytes = 256 << 10;

struct Call {
    Runtime& runtime;
    const LinearWeight& weight;
    const float* x;
    int64_t tokens;
    float* out;
    Activations activations;
};

int64_t align(int64_t bytes) {
    return (bytes + 63) / 64 * 64;
}

const QuantKernels& kernels_of(const Call& call, Type type) {
    return call.runtime.kernels->quant[static_cast<int>(type)];
}

const float* bias_of(const Part& part) {
    return part.bias.empty() ? nullptr : part.bias.data();
}

// Lays the activations out in scratch memory.
void lay_out_activations(Call& call) {
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
    const int64_t per_group = align(4 * items), per_half = align(8 * items), values = align(kGroupColumns * items);
    int64_t bytes = values + 2 * per_group + per_half;
    for (int z = 0; z < kZeroPointCount; ++z) {
        if (needed[z]) bytes += kZeroPoints[z].halves ? per_half : per_group;
    }
    std::byte* at = call.runtime.scratch(Scratch::activations, static_cast<size_t>(bytes));
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

bool is_quantized(const Call& call) {
    return call.activations.values != nullptr;
}

// Tokens [first, last) of the input.
void quantize_tokens(const Call& call, int64_t first, int64_t last) {
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
void prepare_alone(const Call& call, const MakeInput& make_input) {
    if (make_input) make_input(true);
    if (is_quantized(call)) quantize_tokens(call, 0, call.tokens);
}

void prepare_together(const Call& call, const MakeInput& make_input) {
    if (make_input) make_input(false);
    if (!is_quantized(call)) return;
    const int threads = call.runtime.pool.threads();
    const int64_t tile = std::min(kTileTokens, (call.tokens + threads - 1) / threads);
    const int64_t tiles = (call.tokens + tile - 1) / tile;
    const int tasks = static_cast<int>(std::min<int64_t>(tiles, 1024));
    call.runtime.pool.parallel_for_static(tasks, [&](int task, int) {
        quantize_tokens(call, tiles * task / tasks * tile, std::min(call.tokens, tiles * (task + 1) / tasks * tile));
    });
}

// All tokens times blocks [first, last) of a part.
void multiply_blocks(const Call& call, const Part& part, int64_t first, int64_t last) {
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

// The bytes [first, last) of all parts, one after another; a block belongs to where it begins.
void multiply_bytes(const Call& call, int64_t first, int64_t last) {
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
void fetch_until_ready(const Call& call, int64_t first, int64_t last, const std::atomic<bool>& ready) {
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
void multiply_few(const Call& call, const MakeInput& make_input) {
    int64_t bytes = 0;
    for (const Part& part : call.weight.parts()) bytes += part.blocks * part.block_bytes;
    const int threads = call.runtime.pool.threads();
    if (threads == 1 || bytes * call.tokens < kSmallBytes) {
        prepare_alone(call, make_input);
        return multiply_bytes(call, 0, bytes);
    }
    const bool alone = call.tokens * call.weight.in_features() < kAloneValues;
    if (!alone) prepare_together(call, make_input);
    std::atomic<bool> ready{!alone};
    const int64_t shared = bytes - bytes / kSpareFraction;
    call.runtime.pool.parallel_for(threads + kSpareTasks, [&](int task, int thread) {
        const int64_t spare = task - threads;
        const int64_t first = spare < 0 ? shared * task / threads : shared + (bytes - shared) * spare / kSpareTasks;
        const int64_t last =
            spare < 0 ? shared * (task + 1) / threads : shared + (bytes - shared) * (spare + 1) / kSpareTasks;
        if (!ready.load(std::memory_order_acquire)) {
            if (thread == 0) {
                prepare_alone(call, make_input);
                ready.store(true, std::memory_order_release);
            } else {
                fetch_until_ready(call, first, last, ready);
            }
        }
        multiply_bytes(call, first, last);
    });
}

// Tokens [first_token, last_token) times rows [32*index, 32*index+32) of a part.
void multiply_panel(const Call& call, const Part& part, int64_t index, int64_t first_token, int64_t last_token,
                    uint8_t* panel) {
    const QuantKernels& kernels = kernels_of(call, part.type);
    const int64_t units = call.weight.in_features() / kernels.unit_columns;
    const int64_t unit_groups = kernels.unit_columns / kGroupColumns;
    const int64_t chunks = (units * unit_groups + kPanelGroups - 1) / kPanelGroups;
    const int64_t row = index * kPanelRows;
    const float* const bias = bias_of(part);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t first_unit = units * chunk / chunks, last_unit = units * (chunk + 1) / chunks;
        kernels.unpack({.weights = part.memory.data(),
                        .units = units,
                        .blocks = part.blocks,
                        .block = index * (kPanelRows / kRepackRows),
                        .first_unit = first_unit,
                        .last_unit = last_unit,
                        .panel = panel});
        kernels.panel({.panel = panel,
                       .first_group = first_unit * unit_groups,
                       .last_group = last_unit * unit_groups,
                       .activations = &call.activations,
                       .first_token = first_token,
                       .last_token = last_token,
                       .out = call.out + part.first_column + row,
                       .out_stride = call.weight.out_features(),
                       .rows = std::min<int64_t>(kPanelRows, part.rows - row),
                       .bias = bias == nullptr ? nullptr : bias + row});
    }
}

// Many tokens: pieces of 32 rows, claimed one by one, by way of a panel or not.
void multiply_many(const Call& call) {
    const auto panels_of = [](const Part& part) { return (part.rows + kPanelRows - 1) / kPanelRows; };
    const int64_t threads = call.runtime.pool.threads();
    int64_t panels = 0, group_bytes = 0;
    for (const Part& part : call.weight.parts()) {
        panels += panels_of(part);
        if (!is_dense(part.type)) {
            group_bytes = std::max<int64_t>(group_bytes, kernels_of(call, part.type).panel_group_bytes);
        }
    }
    // Balanced chunks of whole units hold up to kPanelGroups groups and a unit's 8 more.
    const int64_t panel_bytes = align((kPanelGroups + 8) * group_bytes);
    uint8_t* const scratch =
        reinterpret_cast<uint8_t*>(call.runtime.scratch(Scratch::panels, static_cast<size_t>(panel_bytes * threads)));
    // Few rows for the threads: cut the tokens too, at tiles (there is more than one from kManyTokens on).
    const int64_t cuts = std::clamp<int64_t>(2 * threads / panels, 1, std::max<int64_t>(1, call.tokens / kManyTokens));
    const int64_t tiles = (call.tokens + kTileTokens - 1) / kTileTokens;
    call.runtime.pool.parallel_for(static_cast<int>(panels * cuts), [&](int task, int thread) {
        int64_t index = task / cuts;
        const int64_t first = tiles * (task % cuts) / cuts * kTileTokens;
        const int64_t last = std::min(call.tokens, tiles * (task % cuts + 1) / cuts * kTileTokens);
        for (const Part& part : call.weight.parts()) {
            if (index >= panels_of(part)) {
                index -= panels_of(part);
                continue;
            }
            if (is_dense(part.type)) {
                Call slice = call;
                slice.x += first * call.weight.in_features();
                slice.out += first * call.weight.out_features();
                slice.tokens = last - first;
                multiply_blocks(slice, part, index, index + 1);
            } else if (call.tokens < kernels_of(call, part.type).panel_tokens) {
                const int64_t step = kPanelRows / kRepackRows;
                multiply_blocks(call, part, step * index, std::min(step * (index + 1), part.blocks));
            } else {
                multiply_panel(call, part, index, first, last, scratch + panel_bytes * thread);
            }
            return;
        }
    });
}

}  // namespace

void multiply(Runtime& runtime, const LinearWeight& weight, const float* x, int64_t tokens, float* out,
              const MakeInput& make_input) {
    if (tokens == 0 || weight.parts().empty()) return;
    Call call{runtime, weight, x, tokens, out, {}};
    lay_out_activations(call);
    if (tokens < kSomeTokens) return multiply_few(call, make_input);
    prepare_together(call, make_input);
    multiply_many(call);
}

}  // namespace mlxr
