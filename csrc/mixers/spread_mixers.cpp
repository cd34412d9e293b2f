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

// Prepares all tokens, then runs the parts of all heads of all sequences.
void spread_recurrence(Runtime& runtime, OperatorName name, PrepareRecurrenceCall prepare, RecurrenceCall call) {
    Counted counted(runtime.tally, {name, KernelName::plain, call.decay_rows > 1 ? 1 : 0});
    counted.does([&] { return measure_recurrence(call); });
    const OperatorTable& table = *operator_table(runtime.isa);
    const int64_t tokens = tokens_of(call.states), heads = 2 * prepare.key_heads * prepare.rows;
    const int64_t normed = prepare.heads == nullptr ? 0 : round_floats(tokens * heads);
    const int64_t decay = round_floats(tokens * prepare.decays), factors = round_floats(tokens * prepare.value_heads);
    const int64_t state = call.rows * kRecurrenceColumns;
    const size_t bytes = static_cast<size_t>(kFloat * (normed + decay + factors + runtime.pool.threads() * state));
    float* const memory = reinterpret_cast<float*>(runtime.scratch(Scratch::mixers, bytes));
    float* const states = memory + normed + decay + factors;
    if (prepare.heads != nullptr) {
        prepare.normed = memory;
        call.q = memory;
        call.k = memory + heads / 2;
        call.q_stride = call.k_stride = heads;
    }
    call.decay = prepare.decay = memory + normed;
    call.factors = prepare.factors = memory + normed + decay;
    run_ranges(runtime, tokens, (prepare.heads == nullptr ? 0 : 2 * heads) + 16 * prepare.decays,
               [&](int64_t first, int64_t last) { table.prepare_recurrence(prepare, first, last); });
    const int64_t tasks = call.states.sequences * call.value_heads * recurrence_parts(call);
    const int threads = runtime.pool.threads();
    if (threads == 1 || tokens * call.value_heads * call.rows * call.columns < kSerialElements) {
        for (int64_t task = 0; task < tasks; ++task) table.recur(call, task, states);
        return;
    }
    const int64_t parts = std::min<int64_t>(tasks, 4 * threads);  // sequences may be of different lengths
    runtime.pool.parallel_for(static_cast<int>(parts), [&](int part, int thread) {
        for (int64_t task = tasks * part / parts; task < tasks * (part + 1) / parts; ++task) {
            table.recur(call, task, states + thread * state);
        }
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
