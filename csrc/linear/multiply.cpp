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
// Few tokens: the last tenth of each thread's share goes in pieces that others may take, to end together.
constexpr int64_t kSpareFraction = 10;
constexpr int kSparePieces = 4;
constexpr int kShareTasks = 1 + kSparePieces;
// Less than this takes one thread no longer than starting the others.
constexpr int64_t kSmallBytes = 32768;
// Up to so many values one thread makes and quantises the input, while the others read weights.
constexpr int64_t kAloneValues = 16384;
// What a waiting thread reads: it must fit into its second-level cache.
constexpr int64_t kWaitBytes = 256 << 10;

// Which forms of the input the parts of a weight need.
struct Needs {
    struct Bytes {
        bool any = false, sums = false, half_sums = false;
        bool zeros[kZeroPointCount] = {};
    };
    Bytes groups, spans;
    bool shorts = false, pairs = false;
    bool any() const { return groups.any || spans.any || shorts || pairs; }
};

Needs find_needs(const LinearCall& call) {
    Needs needs;
    for (const Part& part : call.weight.parts()) {
        needs.pairs |= part.type == Type::bf16;
        needs.shorts |= part.type == Type::f16;
        if (is_dense(part.type) || part.type == Type::f16) continue;
        const QuantKernels& kernels = kernels_of(call, part.type);
        Needs::Bytes& bytes = kernels.spans ? needs.spans : needs.groups;
        bytes.any = true;
        bytes.sums |= kernels.min_columns == 32;
        bytes.half_sums |= kernels.min_columns == 16;
        if (kernels.zero_point >= 0) bytes.zeros[kernels.zero_point] = true;
    }
    return needs;
}

// Lays the activations out from `at` on, or from null on; returns the end.
std::byte* lay_out_activations(LinearCall& call, const Needs& needs, std::byte* at) {
    const auto take = [&at](int64_t size) {
        std::byte* const taken = at;
        at += align_line(size);
        return taken;
    };
    const int64_t tile = tile_of(call.tokens), tokens = (call.tokens + tile - 1) / tile * tile;
    const int64_t columns = call.weight.in_features();
    if (needs.pairs) {
        call.pairs = reinterpret_cast<uint32_t*>(take(4 * tokens * ((columns + 1) / 2)));
        call.pairs_tile = tile;
    }
    const auto take_bytes = [&](Activations& a, const Needs::Bytes& bytes) {
        a.groups = columns / kGroupColumns;
        a.tile = tile;
        const int64_t items = tokens * a.groups;
        a.values = reinterpret_cast<int8_t*>(take(kGroupColumns * items));
        for (int z = 0; z < kZeroPointCount; ++z) {
            const int64_t size = kZeroPoints[z].halves ? 8 * items : 4 * items;
            a.zeros[z] = bytes.zeros[z] ? reinterpret_cast<int32_t*>(take(size)) : nullptr;
        }
        return items;
    };
    if (needs.groups.any) {
        Activations& a = call.input.groups;
        const int64_t items = take_bytes(a, needs.groups);
        a.scales = reinterpret_cast<float*>(take(4 * items));
        a.scaled_sums = reinterpret_cast<float*>(take(4 * items));
    }
    if (needs.spans.any) {
        Activations& a = call.input.spans;
        const int64_t items = take_bytes(a, needs.spans);
        a.scales = reinterpret_cast<float*>(take(4 * (items / kSpanGroups)));
        if (needs.spans.sums) a.sums = reinterpret_cast<int16_t*>(take(2 * items));
        if (needs.spans.half_sums) a.half_sums = reinterpret_cast<int16_t*>(take(4 * items));
    }
    if (needs.shorts) {
        Activations& a = call.input.shorts;
        a.groups = filled_columns(call, Type::f16) / kGroupColumns;
        a.tile = tile;
        const int64_t items = tokens * a.groups;
        a.shorts = reinterpret_cast<int16_t*>(take(2 * kGroupColumns * items));
        a.short_scales = reinterpret_cast<float*>(take(4 * items));
    }
    return at;
}

// Tokens [first, last) of the input into the forms that are needed.
void convert_tokens(const LinearCall& call, const Needs& needs, int64_t first, int64_t last) {
    const int64_t columns = call.weight.in_features();
    if (needs.pairs) {
        operator_table(call.runtime.isa)->narrow_rows({call.x, columns, call.pairs_tile, call.pairs}, first, last);
    }
    quantize(call.runtime, call.input,
             {.x = call.x + first * columns,
              .x_stride = columns,
              .columns = columns,
              .first_token = first,
              .last_token = last,
              .first_group = 0,
              .last_group = kAllGroups,
              .activations = nullptr});
}

// The input, made and quantised by this thread alone.
void prepare_alone(const LinearCall& call, const MakeRows& make_rows) {
    if (make_rows) make_rows(0, call.tokens);
    convert_tokens(call, find_needs(call), 0, call.tokens);
}

}  // namespace

void quantize(const Runtime& runtime, const QuantizedInput& input, const QuantizeJob& job) {
    const KernelTable& kernels = *runtime.kernels;
    const auto convert = [&](const Activations& to, void (*kernel)(const QuantizeJob&)) {
        if (to.groups == 0) return;
        QuantizeJob own = job;
        own.last_group = std::min(job.last_group, to.groups);
        own.activations = &to;
        kernel(own);
    };
    convert(input.groups, kernels.quantize_groups);
    convert(input.spans, kernels.quantize_spans);
    convert(input.shorts, kernels.quantize_shorts);
}

Ran describe_call(const LinearCall& call, bool gated) {
    Ran ran(OperatorName::linear);
    for (const Part& part : call.weight.parts()) {
        ran.add(gated ? KernelName::gated_panels : choose_kernel(call, part), static_cast<int>(part.type));
    }
    return ran;
}

Tally::Work measure_call(const LinearCall& call) {
    const int64_t in = call.weight.in_features(), out = call.weight.out_features();
    const int64_t floats = static_cast<int64_t>(sizeof(float)) * call.tokens * (in + out);
    return {.nanoseconds = 0, .bytes = call.weight.bytes() + floats, .macs = call.tokens * in * out};
}

LinearCall begin_call(Runtime& runtime, const LinearWeight& weight, const float* x, int64_t tokens, float* out,
                      Scratch use) {
    LinearCall call{runtime, weight, x, tokens, out, {}, nullptr, 0};
    const Needs needs = find_needs(call);
    if (!needs.any()) return call;
    const std::byte* const nothing = nullptr;
    const auto bytes = static_cast<size_t>(lay_out_activations(call, needs, nullptr) - nothing);
    lay_out_activations(call, needs, runtime.scratch(use, bytes));
    return call;
}

void prepare_together(const LinearCall& call, const MakeRows& make_rows) {
    const Needs needs = find_needs(call);
    if (!make_rows && !needs.any()) return;
    const int threads = call.runtime.pool.threads();
    const int64_t tile = std::min(kTileTokens, (call.tokens + threads - 1) / threads);
    const int64_t tiles = (call.tokens + tile - 1) / tile;
    const int tasks = static_cast<int>(std::min<int64_t>(tiles, 1024));
    call.runtime.pool.parallel_for_near(tasks, [&](int task, int) {
        const int64_t end = std::min(call.tokens, tiles * (task + 1) / tasks * tile);
        for (int64_t first = tiles * task / tasks * tile; first < end; first += tile) {
            const int64_t last = std::min(first + tile, end);
            if (make_rows) make_rows(first, last);
            convert_tokens(call, needs, first, last);  // while they are in the cache
        }
    });
}

void multiply_dense(const LinearCall& call, const Part& part, int64_t first, int64_t last, int64_t first_token,
                    int64_t last_token) {
    const int64_t stride = call.weight.out_features(), columns = call.weight.in_features();
    float* const out = call.out + part.first_column;
    if (part.type == Type::bf16) {
        const auto* const weights = reinterpret_cast<const uint32_t*>(part.memory.data());
        return operator_table(call.runtime.isa)
            ->multiply_dense_pairs(
                {weights, columns, part.rows, call.pairs, call.pairs_tile, out, stride, bias_of(part)}, first, last,
                first_token, last_token);
    }
    call.runtime.kernels->dense({.weights = part.memory.data(),
                                 .columns = columns,
                                 .first_block = first,
                                 .last_block = last,
                                 .rows = part.rows,
                                 .x = call.x + first_token * columns,
                                 .tokens = last_token - first_token,
                                 .out = out + first_token * stride,
                                 .out_stride = stride,
                                 .bias = bias_of(part)});
}

void multiply_blocks(const LinearCall& call, const Part& part, int64_t first, int64_t last) {
    if (is_dense(part.type)) return multiply_dense(call, part, first, last, 0, call.tokens);
    rows_kernel(call, part)
        .run({.weights = part.memory.data(),
              .units = units_of(call, part.type),
              .first_block = first,
              .last_block = last,
              .rows = part.rows,
              .activations = &activations_of(call, part.type),
              .tokens = call.tokens,
              .out = call.out + part.first_column,
              .out_stride = call.weight.out_features(),
              .bias = bias_of(part)});
}

namespace {

// The bytes [first, last) of all parts, one after another; a block, or strip of blocks, belongs to where it begins.
void multiply_bytes(const LinearCall& call, int64_t first, int64_t last) {
    int64_t begin = 0;
    for (const Part& part : call.weight.parts()) {
        const int64_t step = uses_strips(call, part) ? kPanelRows / kRepackRows : 1,
                      step_bytes = step * part.block_bytes;
        const auto block_at = [&](int64_t byte) {
            return std::clamp<int64_t>((byte - begin + step_bytes - 1) / step_bytes * step, 0, part.blocks);
        };
        const int64_t first_block = first <= begin ? 0 : block_at(first),
                      last_block = last <= begin ? 0 : block_at(last);
        if (first_block < last_block) multiply_blocks(call, part, first_block, last_block);
        begin += part.blocks * part.block_bytes;
    }
}

// Reads the first bytes of [first, last) of all parts, until the input is ready, and waits for it. They are loads, as
// processors drop prefetches when many are on their way.
void read_until_ready(const LinearCall& call, int64_t first, int64_t last, const std::atomic<bool>& ready) {
    constexpr int64_t kLine = 64, kStep = 2048;
    last = std::min(last, first + kWaitBytes);
    int64_t begin = 0;
    for (const Part& part : call.weight.parts()) {
        const int64_t bytes = part.blocks * part.block_bytes;
        int64_t at = std::max<int64_t>(first - begin, 0);
        for (const int64_t end = std::min(last - begin, bytes); at < end; at += kStep) {
            if (ready.load(std::memory_order_acquire)) return;
            for (int64_t line = at, stop = std::min(at + kStep, end); line < stop; line += kLine) {
                (void)*static_cast<const volatile uint8_t*>(part.memory.data() + line);
            }
        }
        begin += bytes;
    }
    wait_until([&] { return ready.load(std::memory_order_acquire); });
}

// Few tokens: bound by reading the weights. Each thread reads one contiguous run, and then helps the others with the
// ends of theirs. Little input is made by the calling thread, while the others begin to read.
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
    const auto share_at = [&](int64_t share) { return bytes * share / threads; };
    // A share's own part, and then the pieces of what is left of it.
    const auto task_at = [&](int64_t share, int64_t task) {
        const int64_t first = share_at(share), last = share_at(share + 1), spare = (last - first) / kSpareFraction;
        return task == 0 ? first : last - spare + spare * (task - 1) / kSparePieces;
    };
    call.runtime.pool.parallel_for_near(threads * kShareTasks, [&](int index, int thread) {
        const int share = index / kShareTasks, task = index % kShareTasks;
        const int64_t first = task_at(share, task), last = task_at(share, task + 1);
        if (!ready.load(std::memory_order_acquire)) {
            if (thread == 0) {
                prepare_alone(call, make_rows);
                ready.store(true, std::memory_order_release);
            } else {
                read_until_ready(call, first, last, ready);
            }
        }
        multiply_bytes(call, first, last);
    });
}

}  // namespace

void multiply(Runtime& runtime, const LinearWeight& weight, const float* x, int64_t tokens, float* out,
              const MakeRows& make_rows) {
    if (tokens == 0 || weight.parts().empty()) return;
    const LinearCall call = begin_call(runtime, weight, x, tokens, out, Scratch::activations);
    Counted counted(runtime.tally, describe_call(call));
    counted.does([&] { return measure_call(call); });
    if (tokens < kSomeTokens) return multiply_few(call, make_rows);
    prepare_together(call, make_rows);
    multiply_many(call);
}

}  // namespace mlxr
