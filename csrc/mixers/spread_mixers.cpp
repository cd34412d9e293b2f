// See spread_mixers.h.
#include "mixers/spread_mixers.h"

#include <algorithm>

#include "operators/operator_table.h"
#include "runtime/ranges.h"

namespace mlxr {

namespace {

int64_t tokens_of(const States& states) {
    return states.starts[states.sequences];
}

constexpr int64_t kFloat = static_cast<int64_t>(sizeof(float));

// Floats of memory, each array from a cache line of its own.
int64_t round_floats(int64_t floats) {
    return (floats + 15) / 16 * 16;
}

Tally::Work measure_recurrence(const RecurrenceCall& call) {
    const int64_t tokens = tokens_of(call.states), state = call.value_heads * call.rows * call.columns;
    const int64_t token_floats = 2 * call.key_heads * call.rows + 2 * call.value_heads * call.columns;
    return {.nanoseconds = 0,
            .bytes = kFloat * (2 * call.states.sequences * state + tokens * token_floats),
            .macs = (call.delta ? 3 : 2) * tokens * state};
}

int64_t longest_of(const States& states) {
    int64_t longest = 0;
    for (int64_t i = 0; i < states.sequences; ++i) {
        longest = std::max<int64_t>(longest, states.starts[i + 1] - states.starts[i]);
    }
    return longest;
}

// Runs tasks [first, last). Queries and keys that must be normed are where they are used, in `normed` (2,
// `normed_floats`), so that they stay in the cache of the processor that reads them for each part of each head.
void run_tasks(const OperatorTable& table, const PrepareRecurrenceCall& prepare, const RecurrenceCall& call,
               int64_t first, int64_t last, float* state, float* normed, int64_t normed_floats) {
    int64_t sequence = -1, key_head = -1;
    KeyRows keys{};
    for (int64_t index = first; index < last; ++index) {
        const RecurrenceTask task = find_recurrence_task(call, index);
        if (task.sequence != sequence || task.key_head != key_head) {
            sequence = task.sequence;
            key_head = task.key_head;
            const int64_t begin = call.states.starts[sequence], end = call.states.starts[sequence + 1];
            if (prepare.heads == nullptr) {
                const int64_t at = key_head * call.rows;
                keys = {call.q + begin * call.q_stride + at, call.k + begin * call.k_stride + at, call.q_stride,
                        call.k_stride};
            } else {
                keys = {normed, normed + normed_floats, call.rows, call.rows};
                table.norm_keys(prepare, key_head, begin, end, normed, normed + normed_floats);
            }
        }
        table.recur(call, task, keys, state);
    }
}

// Prepares the decays of all tokens, then runs the parts of all heads of all sequences.
void spread_recurrence(Runtime& runtime, OperatorName name, PrepareRecurrenceCall prepare, RecurrenceCall call) {
    Counted counted(runtime.tally, {name, KernelName::plain, call.decay_rows > 1 ? 1 : 0});
    counted.does([&] { return measure_recurrence(call); });
    const OperatorTable& table = *operator_table(runtime.isa);
    const int64_t tokens = tokens_of(call.states), threads = runtime.pool.threads();
    const int64_t decay = round_floats(tokens * prepare.decays), factors = round_floats(tokens * prepare.value_heads);
    const int64_t state = round_floats(call.rows * kRecurrenceColumns);
    const int64_t normed = prepare.heads == nullptr ? 0 : round_floats(longest_of(call.states) * call.rows);
    const int64_t own = state + 2 * normed;
    const size_t bytes = static_cast<size_t>(kFloat * (decay + factors + threads * own));
    float* const memory = reinterpret_cast<float*>(runtime.scratch(Scratch::mixers, bytes));
    call.decay = prepare.decay = memory;
    call.factors = prepare.factors = memory + decay;
    run_ranges(runtime, tokens, 16 * prepare.decays,
               [&](int64_t first, int64_t last) { table.prepare_recurrence(prepare, first, last); });
    const auto run = [&](int64_t first, int64_t last, int thread) {
        float* const scratch = memory + decay + factors + thread * own;
        run_tasks(table, prepare, call, first, last, scratch, scratch + state, normed);
    };
    const int64_t keys = call.states.sequences * call.key_heads;
    const int64_t tasks = call.states.sequences * call.value_heads * recurrence_parts(call);
    if (threads == 1 || tokens * call.value_heads * call.rows * call.columns < kSerialElements) {
        return run(0, tasks, 0);
    }
    // Whole key heads, whose keys are normed once, where the threads then end together.
    const bool by_key = keys >= 4 * threads || keys % threads == 0;
    const int64_t units = by_key ? keys : tasks, each = tasks / units, ranges = std::min(units, 8 * threads);
    runtime.pool.parallel_for(static_cast<int>(ranges), [&](int range, int thread) {
        run(units * range / ranges * each, units * (range + 1) / ranges * each, thread);
    });
}

}  // namespace

void spread_short_conv(Runtime& runtime, const ShortConvCall& call) {
    Counted counted(runtime.tally, {OperatorName::short_conv, KernelName::plain, static_cast<int>(call.kind)});
    const int64_t tokens = tokens_of(call.states), inputs = call.kind == ConvKind::gated ? 3 : 1;
    counted.does([&] {
        const int64_t states = 2 * call.states.sequences * (call.taps - 1);
        return Tally::Work{.nanoseconds = 0,
                           .bytes = kFloat * call.channels * ((inputs + 1) * tokens + states),
                           .macs = tokens * call.taps * call.channels};
    });
    const OperatorTable& table = *operator_table(runtime.isa);
    run_ranges(runtime, tokens, (inputs + call.taps) * call.channels,
               [&](int64_t first, int64_t last) { table.short_conv(call, first, last); });
    run_ranges(runtime, call.states.sequences, (call.taps - 1) * call.channels,
               [&](int64_t first, int64_t last) { table.short_conv_states(call, first, last); });
}

void spread_gated_delta(Runtime& runtime, PrepareRecurrenceCall prepare, RecurrenceCall call) {
    call.delta = true;
    spread_recurrence(runtime, OperatorName::gated_delta, prepare, call);
}

void spread_mamba2(Runtime& runtime, PrepareRecurrenceCall prepare, RecurrenceCall call) {
    call.delta = false;
    spread_recurrence(runtime, OperatorName::mamba2, prepare, call);
}

void spread_scan(Runtime& runtime, const ScanCall& call) {
    Counted counted(runtime.tally, {OperatorName::scan, KernelName::plain, 0});
    const int64_t tokens = tokens_of(call.states), state = call.rows * call.channels;
    counted.does([&] {
        const int64_t token_floats = 3 * call.channels + 2 * call.rows;
        return Tally::Work{.nanoseconds = 0,
                           .bytes = kFloat * (2 * call.states.sequences * state + tokens * token_floats),
                           .macs = 3 * tokens * state};
    });
    const OperatorTable& table = *operator_table(runtime.isa);
    const int64_t threads = runtime.pool.threads(), own = round_floats(scan_scratch_floats(call));
    const size_t bytes = static_cast<size_t>(kFloat * threads * own);
    float* const memory = reinterpret_cast<float*>(runtime.scratch(Scratch::mixers, bytes));
    const int64_t parts = scan_parts(call), tasks = call.states.sequences * parts;
    const auto run = [&](int64_t first, int64_t last, int thread) {
        for (int64_t task = first; task < last; ++task) {
            table.scan(call, task / parts, task % parts, memory + thread * own);
        }
    };
    if (threads == 1 || tokens * state < kSerialElements) return run(0, tasks, 0);
    const int64_t ranges = std::min(tasks, 8 * threads);
    runtime.pool.parallel_for(static_cast<int>(ranges), [&](int range, int thread) {
        run(tasks * range / ranges, tasks * (range + 1) / ranges, thread);
    });
}

void spread_gated_norm(Runtime& runtime, const GatedNormCall& call, int64_t rows) {
    Counted counted(runtime.tally, {OperatorName::gated_norm, KernelName::plain,
                                    call.weight == nullptr ? 2
                                    : call.gate_first      ? 1
                                                           : 0});
    counted.does([&] { return Tally::Work{.nanoseconds = 0, .bytes = 3 * kFloat * rows * call.columns, .macs = 0}; });
    const OperatorTable& table = *operator_table(runtime.isa);
    run_ranges(runtime, rows, 4 * call.columns,
               [&](int64_t first, int64_t last) { table.gated_norm(call, first, last); });
}

}  // namespace mlxr
