// The product: quantise the activations once, then share out the rows. Few tokens; for many see panels.cpp.
#include <algorithm>
#include <atomic>
#include <cstddef>

#include "linear/call.h"

namespace mlxr {

namespace {

using Part = LinearWeight::Part;

// Few tokens: the last tenth of each thread's share goes in pieces that others may take, to end together.
constexpr int64_t kSpareFraction = 10;
constexpr int kSparePieces = 4;
// Less than this takes one thread no longer than starting the others.
constexpr int64_t kSmallBytes = 32768;
// What a waiting thread reads: it must fit into its second-level cache.
constexpr int64_t kWaitBytes = 256 << 10;

// Rows of a call's parts cost their bytes as long as memory bounds it; more tokens cost arithmetic.
constexpr int64_t kBoundTokens = 8;

// What a byte of a call costs.
int64_t cost_of(const LinearCall& call) {
    return std::max(kBoundTokens, call.tokens());
}

// The input, made and quantised by this thread alone.
void prepare_alone(const LinearCall& call, const MakeRows& make_rows) {
    if (make_rows) make_rows(0, call.tokens());
    convert_tokens(call.runtime, call.input, 0, call.tokens());
}

}  // namespace

void describe_call(const LinearCall& call, bool gated, Ran& ran) {
    for (const Part& part : call.weight.parts()) {
        ran.add(name_kernel(call, part, gated), static_cast<int>(part.type));
    }
}

Tally::Work measure_call(const LinearCall& call) {
    const int64_t in = call.weight.in_features(), out = call.weight.out_features();
    const int64_t floats = static_cast<int64_t>(sizeof(float)) * call.tokens() * (in + out);
    return {.nanoseconds = 0, .bytes = call.weight.bytes() + floats, .macs = call.tokens() * in * out};
}

LinearCall begin_call(Runtime& runtime, const LinearWeight& weight, const float* x, int64_t tokens, float* out,
                      Scratch use) {
    LinearInput input{.x = x, .tokens = tokens, .columns = weight.in_features(), .tile = tile_of(tokens)};
    Needs needs;
    needs.add(runtime, weight);
    if (needs.converts()) {
        const auto bytes = static_cast<size_t>(measure_input(runtime, needs, input));
        lay_out(runtime, needs, input, runtime.scratch(use, bytes));
    }
    return {runtime, weight, input, out};
}

void prepare_together(const LinearCall& call, const MakeRows& make_rows) {
    Needs needs;
    needs.add(call.runtime, call.weight);
    if (!make_rows && !needs.converts()) return;
    const int threads = call.runtime.pool.threads();
    const int64_t tile = std::min(kTileTokens, (call.tokens() + threads - 1) / threads);
    const int64_t tiles = (call.tokens() + tile - 1) / tile;
    const int tasks = static_cast<int>(std::min<int64_t>(tiles, 1024));
    call.runtime.pool.parallel_for_near(tasks, [&](int task, int) {
        const int64_t end = std::min(call.tokens(), tiles * (task + 1) / tasks * tile);
        for (int64_t first = tiles * task / tasks * tile; first < end; first += tile) {
            const int64_t last = std::min(first + tile, end);
            if (make_rows) make_rows(first, last);
            convert_tokens(call.runtime, call.input, first, last);  // while they are in the cache
        }
    });
}

void multiply_dense(const LinearCall& call, const Part& part, int64_t first, int64_t last, int64_t first_token,
                    int64_t last_token) {
    const int64_t stride = call.stride(), columns = call.weight.in_features();
    float* const out = call.out + part.first_column;
    if (part.type == Type::bf16) {
        const auto* const weights = reinterpret_cast<const uint32_t*>(part.memory.data());
        return operator_table(call.runtime.isa)
            ->multiply_dense_pairs(
                {weights, columns, part.rows, call.input.pairs, call.input.tile, out, stride, bias_of(part)}, first,
                last, first_token, last_token);
    }
    call.runtime.kernels->dense({.weights = part.memory.data(),
                                 .columns = columns,
                                 .first_block = first,
                                 .last_block = last,
                                 .rows = part.rows,
                                 .x = call.input.x + first_token * columns,
                                 .tokens = last_token - first_token,
                                 .out = out + first_token * stride,
                                 .out_stride = stride,
                                 .bias = bias_of(part)});
}

void multiply_blocks(const LinearCall& call, const Part& part, int64_t first, int64_t last) {
    if (is_dense(part.type)) return multiply_dense(call, part, first, last, 0, call.tokens());
    rows_kernel(call, part)
        .run({.weights = part.memory.data(),
              .units = units_of(call, part.type),
              .first_block = first,
              .last_block = last,
              .rows = part.rows,
              .activations = &activations_of(call, part.type),
              .tokens = call.tokens(),
              .out = call.out + part.first_column,
              .out_stride = call.stride(),
              .bias = bias_of(part)});
}

namespace {

// The run [first, last) of what all parts of all calls cost, one after another; a block, or strip of blocks, belongs to
// where it begins.
void multiply_run(std::span<const LinearCall> calls, int64_t first, int64_t last) {
    int64_t begin = 0;
    for (const LinearCall& call : calls) {
        for (const Part& part : call.weight.parts()) {
            const int64_t step = uses_strips(call, part) ? kPanelRows / kRepackRows : 1;
            const int64_t step_cost = step * part.block_bytes * cost_of(call);
            const auto block_at = [&](int64_t cost) {
                return std::clamp<int64_t>((cost - begin + step_cost - 1) / step_cost * step, 0, part.blocks);
            };
            const int64_t first_block = first <= begin ? 0 : block_at(first),
                          last_block = last <= begin ? 0 : block_at(last);
            if (first_block < last_block) multiply_blocks(call, part, first_block, last_block);
            begin += part.blocks * part.block_bytes * cost_of(call);
        }
    }
}

// Reads what a run begins with, until the input is ready, and waits for it. They are loads, as processors drop
// prefetches when many are on their way.
void read_until_ready(std::span<const LinearCall> calls, int64_t first, int64_t last, const std::atomic<bool>& ready) {
    constexpr int64_t kLine = 64, kStep = 2048;
    int64_t begin = 0, left = kWaitBytes;
    for (const LinearCall& call : calls) {
        const int64_t cost = cost_of(call);
        for (const Part& part : call.weight.parts()) {
            const int64_t bytes = part.blocks * part.block_bytes;
            int64_t at = std::max<int64_t>((first - begin) / cost, 0);
            for (const int64_t end = std::min({(last - begin) / cost, bytes, at + left}); at < end; at += kStep) {
                if (ready.load(std::memory_order_acquire)) return;
                for (int64_t line = at, stop = std::min(at + kStep, end); line < stop; line += kLine) {
                    (void)*static_cast<const volatile uint8_t*>(part.memory.data() + line);
                }
                left -= kStep;
            }
            begin += bytes * cost;
        }
    }
    wait_until([&] { return ready.load(std::memory_order_acquire); });
}

}  // namespace

void multiply_few(Runtime& runtime, std::span<const LinearCall> calls, const Prepare& prepare, const Beside* beside) {
    int64_t all = 0;
    for (const LinearCall& call : calls) {
        for (const Part& part : call.weight.parts()) all += part.blocks * part.block_bytes * cost_of(call);
    }
    const int threads = runtime.pool.threads();
    if (threads == 1 || all < kSmallBytes * kBoundTokens) {
        if (prepare) prepare();
        multiply_run(calls, 0, all);
        for (int share = 0; beside != nullptr && share < beside->shares; ++share) beside->run(share);
        return;
    }
    std::atomic<bool> ready{!prepare};
    const auto share_at = [&](int64_t share) { return all * share / threads; };
    // A share's own part, and the pieces of what is left of it; between them the share of what is done beside.
    const int extra = beside == nullptr ? 0 : 1, share_tasks = 1 + extra + kSparePieces;
    const auto task_at = [&](int64_t share, int64_t task) {
        const int64_t first = share_at(share), last = share_at(share + 1), spare = (last - first) / kSpareFraction;
        return task == 0 ? first : last - spare + spare * (task - 1) / kSparePieces;
    };
    runtime.pool.parallel_for_near(threads * share_tasks, [&](int index, int thread) {
        const int share = index / share_tasks, begun = index % share_tasks, task = begun == 0 ? 0 : begun - extra;
        if (begun != 0 && task == 0) {
            wait_until([&] { return ready.load(std::memory_order_acquire); });
            if (share < beside->shares) beside->run(share);
            return;
        }
        const int64_t first = task_at(share, task), last = task_at(share, task + 1);
        if (!ready.load(std::memory_order_acquire)) {
            if (thread == 0) {
                prepare();
                ready.store(true, std::memory_order_release);
            } else {
                read_until_ready(calls, first, last, ready);
            }
        }
        multiply_run(calls, first, last);
    });
}

void multiply(Runtime& runtime, const LinearWeight& weight, const float* x, int64_t tokens, float* out,
              const MakeRows& make_rows, const Beside* beside) {
    if (tokens == 0 || weight.parts().empty()) return;
    const LinearCall call = begin_call(runtime, weight, x, tokens, out, Scratch::activations);
    Ran ran(OperatorName::linear);
    describe_call(call, false, ran);
    Counted counted(runtime.tally, ran);
    counted.does([&] { return measure_call(call); });
    if (tokens < kSomeTokens) {
        const bool alone = tokens * weight.in_features() < kAloneValues || runtime.pool.threads() == 1;
        if (!alone) prepare_together(call, make_rows);
        const Prepare prepare = [&] { prepare_alone(call, make_rows); };
        return multiply_few(runtime, {&call, 1}, alone ? prepare : nullptr, beside);
    }
    prepare_together(call, make_rows);
    multiply_many(call);
    if (beside == nullptr) return;
    runtime.pool.parallel_for_near(beside->shares, [&](int share, int) { beside->run(share); });
}

}  // namespace mlxr
