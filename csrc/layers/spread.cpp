// See spread.h.
#include "layers/spread.h"

#include <algorithm>

#include "runtime/ranges.h"

namespace mlxr {

namespace {

constexpr int64_t kStripColumns = 1024;  // columns of one row of activate that one thread takes

template <typename Call>
Ran describe_norm(OperatorName what, KernelName kernel, const Call& call) {
    return {what, kernel, call.residual == nullptr ? 0 : kResidual};
}

Ran describe_activate(KernelName kernel, const ActivateCall& call) {
    return {OperatorName::activate, kernel, static_cast<int>(call.kind) | (call.up == nullptr ? kUngated : 0)};
}

// What an element-wise operator does to `count` floats, which are read or written.
void does_floats(Counted& counted, int64_t count) {
    counted.does(
        [&] { return Tally::Work{.nanoseconds = 0, .bytes = count * static_cast<int64_t>(sizeof(float)), .macs = 0}; });
}

// Keys, and values as many `pools` have them: floats in, numbers as the pages keep them out.
Tally::Work measure_write(const WritePagesCall& call, int64_t pools) {
    const int64_t rows = pools * call.tokens * call.kv_heads;
    const int64_t bytes = static_cast<int64_t>(sizeof(float)) * call.head_dim + row_bytes(call.type, call.head_dim);
    return {.nanoseconds = 0, .bytes = rows * bytes, .macs = 0};
}

}  // namespace

void spread_rms_norm(Runtime& runtime, const RmsNormCall& call, int64_t rows) {
    Counted counted(runtime.tally, describe_norm(OperatorName::rms_norm, KernelName::plain, call));
    does_floats(counted, (call.residual == nullptr ? 2 : 4) * rows * call.columns);
    const OperatorTable& table = *operator_table(runtime.isa);
    run_ranges(runtime, rows, call.columns, [&](int64_t first, int64_t last) { table.rms_norm(call, first, last); });
}

void spread_layer_norm(Runtime& runtime, const LayerNormCall& call, int64_t rows) {
    Counted counted(runtime.tally, describe_norm(OperatorName::layer_norm, KernelName::plain, call));
    does_floats(counted, (call.residual == nullptr ? 2 : 4) * rows * call.columns);
    const OperatorTable& table = *operator_table(runtime.isa);
    run_ranges(runtime, rows, call.columns, [&](int64_t first, int64_t last) { table.layer_norm(call, first, last); });
}

void spread_rope(Runtime& runtime, const RopeCall& call, int64_t tokens) {
    Counted counted(runtime.tally, {OperatorName::rope, KernelName::plain, call.interleaved ? 1 : 0});
    does_floats(counted, 2 * tokens * call.heads * call.rot_dim);
    const OperatorTable& table = *operator_table(runtime.isa);
    run_ranges(runtime, tokens, call.heads * (call.factors == nullptr ? call.rot_dim : call.head_dim),
               [&](int64_t first, int64_t last) { table.rope(call, first, last); });
}

void spread_activate(Runtime& runtime, const ActivateCall& call, int64_t rows) {
    Counted counted(runtime.tally, describe_activate(KernelName::plain, call));
    does_floats(counted, (call.up == nullptr ? 2 : 3) * rows * call.columns);
    const OperatorTable& table = *operator_table(runtime.isa);
    const int64_t strips = (call.columns + kStripColumns - 1) / kStripColumns;
    const int64_t elements = 4 * std::min(call.columns, kStripColumns);  // an element costs as much as four of others
    run_ranges(runtime, rows * strips, elements, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const int64_t start = i % strips * kStripColumns;
            table.activate(call, i / strips, i / strips + 1, start, std::min(call.columns, start + kStripColumns));
        }
    });
}

void spread_scale(Runtime& runtime, const ScaleCall& call, int64_t count) {
    Counted counted(runtime.tally, {OperatorName::scale, KernelName::plain, call.softcap > 0 ? 1 : 0});
    does_floats(counted, 2 * count);
    const OperatorTable& table = *operator_table(runtime.isa);
    const int64_t strips = (count + kStripColumns - 1) / kStripColumns;
    run_ranges(runtime, strips, (call.softcap > 0 ? 4 : 1) * kStripColumns, [&](int64_t first, int64_t last) {
        table.scale(call, first * kStripColumns, std::min(count, last * kStripColumns));
    });
}

void spread_add(Runtime& runtime, const AddCall& call, int64_t count) {
    Counted counted(runtime.tally, {OperatorName::add, KernelName::plain, call.factor == 1.0f ? 0 : 1});
    does_floats(counted, 3 * count);
    const OperatorTable& table = *operator_table(runtime.isa);
    const int64_t strips = (count + kStripColumns - 1) / kStripColumns;
    run_ranges(runtime, strips, kStripColumns, [&](int64_t first, int64_t last) {
        table.add(call, first * kStripColumns, std::min(count, last * kStripColumns));
    });
}

void spread_gate_heads(Runtime& runtime, const GateHeadsCall& call, int64_t rows) {
    Counted counted(runtime.tally,
                    {OperatorName::gate_heads, KernelName::plain, call.gate_count == call.columns ? 1 : 0});
    does_floats(counted, 2 * rows * call.columns);
    const OperatorTable& table = *operator_table(runtime.isa);
    run_ranges(runtime, rows, 4 * call.columns,
               [&](int64_t first, int64_t last) { table.gate_heads(call, first, last); });
}

namespace {

// What an operator of streams does, which reads and writes `times` numbers for each one of its rows.
template <typename Call, typename Body>
void count_streams(Runtime& runtime, const Call& call, int64_t rows, int form, int64_t times, const Body& body) {
    Counted counted(runtime.tally, {OperatorName::streams, KernelName::plain, form});
    const int64_t columns = call.streams * call.columns;
    does_floats(counted, times * rows * columns);
    const OperatorTable& table = *operator_table(runtime.isa);
    constexpr int64_t kCosts[] = {4, 1, 1, 64, 2, 2};
    run_ranges(runtime, rows, kCosts[form] * columns, [&](int64_t first, int64_t last) { body(table, first, last); });
}

}  // namespace

void run_streams(Runtime& runtime, const MixStreamsCall& call, int64_t rows) {
    count_streams(runtime, call, rows, 0, 2, [&](const OperatorTable& table, int64_t first, int64_t last) {
        table.mix_streams(call, first, last);
    });
}

void run_streams(Runtime& runtime, const SpreadStreamsCall& call, int64_t rows) {
    count_streams(runtime, call, rows, 1, 2, [&](const OperatorTable& table, int64_t first, int64_t last) {
        table.spread_streams(call, first, last);
    });
}

void run_streams(Runtime& runtime, const MatchStreamsCall& call, int64_t rows) {
    count_streams(runtime, call, rows, 2, 2, [&](const OperatorTable& table, int64_t first, int64_t last) {
        table.match_streams(call, first, last);
    });
}

void run_streams(Runtime& runtime, const BalanceStreamsCall& call, int64_t rows) {
    count_streams(runtime, call, rows, 3, 2, [&](const OperatorTable& table, int64_t first, int64_t last) {
        table.balance_streams(call, first, last);
    });
}

void run_streams(Runtime& runtime, const BlendStreamsCall& call, int64_t rows) {
    count_streams(
        runtime, call, rows, 4, call.added == nullptr ? 1 : 2,
        [&](const OperatorTable& table, int64_t first, int64_t last) { table.blend_streams(call, first, last); });
}

void run_streams(Runtime& runtime, const LevelStreamsCall& call, int64_t rows) {
    count_streams(runtime, call, rows, 5, 2, [&](const OperatorTable& table, int64_t first, int64_t last) {
        table.level_streams(call, first, last);
    });
}

void spread_cut_gates(Runtime& runtime, const CutGatesCall& call, int64_t rows) {
    constexpr int kCut = 4;
    Counted counted(runtime.tally, {OperatorName::scale, KernelName::plain, kCut});
    does_floats(counted, 2 * rows * call.columns);
    const OperatorTable& table = *operator_table(runtime.isa);
    run_ranges(runtime, rows, 3 * call.columns,
               [&](int64_t first, int64_t last) { table.cut_gates(call, first, last); });
}

void spread_write_pages(Runtime& runtime, const WritePagesCall& keys, const WritePagesCall* values) {
    const int64_t pools = values == nullptr ? 1 : 2;
    Counted counted(runtime.tally, {OperatorName::write_pages, KernelName::plain, static_cast<int>(keys.type)});
    counted.does([&] { return measure_write(keys, pools); });
    const OperatorTable& table = *operator_table(runtime.isa);
    const int64_t elements = 4 * keys.tokens * keys.head_dim;  // most go to lines of their own, which are not at hand
    run_ranges(runtime, pools * keys.kv_heads, elements, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) table.write_pages(i % pools == 0 ? keys : *values, i / pools);
    });
}

MakeRows fuse_rms_norm(Runtime& runtime, const RmsNormCall& call) {
    runtime.tally.count(describe_norm(OperatorName::rms_norm, KernelName::fused, call));
    const OperatorTable& table = *operator_table(runtime.isa);
    return [&table, call](int64_t first, int64_t last) { table.rms_norm(call, first, last); };
}

MakeRows fuse_layer_norm(Runtime& runtime, const LayerNormCall& call) {
    runtime.tally.count(describe_norm(OperatorName::layer_norm, KernelName::fused, call));
    const OperatorTable& table = *operator_table(runtime.isa);
    return [&table, call](int64_t first, int64_t last) { table.layer_norm(call, first, last); };
}

MakeRows fuse_activate(Runtime& runtime, const ActivateCall& call) {
    runtime.tally.count(describe_activate(KernelName::fused, call));
    const OperatorTable& table = *operator_table(runtime.isa);
    return [&table, call](int64_t first, int64_t last) { table.activate(call, first, last, 0, call.columns); };
}

}  // namespace mlxr
