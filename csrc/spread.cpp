// See spread.h.
#include "spread.h"

#include <algorithm>

namespace mlxr {

namespace {

constexpr int64_t kStripColumns = 1024;  // columns of one row of activate that one thread takes

// Runs body(first, last) over [0, count), on several threads when the work, in elements, is worth it.
template <typename Body>
void run_ranges(Runtime& runtime, int64_t count, int64_t elements_each, const Body& body) {
    const int threads = runtime.pool.threads();
    if (threads == 1 || count * elements_each < kSerialElements) return body(int64_t{0}, count);
    const int64_t parts = std::min<int64_t>(count, threads);
    runtime.pool.parallel_for_near(static_cast<int>(parts),
                                   [&](int part, int) { body(count * part / parts, count * (part + 1) / parts); });
}

}  // namespace

void spread_rms_norm(Runtime& runtime, const RmsNormCall& call, int64_t rows) {
    const OperatorTable& table = *operator_table(runtime.isa);
    run_ranges(runtime, rows, call.columns, [&](int64_t first, int64_t last) { table.rms_norm(call, first, last); });
}

void spread_layer_norm(Runtime& runtime, const LayerNormCall& call, int64_t rows) {
    const OperatorTable& table = *operator_table(runtime.isa);
    run_ranges(runtime, rows, call.columns, [&](int64_t first, int64_t last) { table.layer_norm(call, first, last); });
}

void spread_rope(Runtime& runtime, const RopeCall& call, int64_t tokens) {
    const OperatorTable& table = *operator_table(runtime.isa);
    run_ranges(runtime, tokens, call.heads * (call.factors == nullptr ? call.rot_dim : call.head_dim),
               [&](int64_t first, int64_t last) { table.rope(call, first, last); });
}

void spread_activate(Runtime& runtime, const ActivateCall& call, int64_t rows) {
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
    const OperatorTable& table = *operator_table(runtime.isa);
    const int64_t strips = (count + kStripColumns - 1) / kStripColumns;
    run_ranges(runtime, strips, (call.softcap > 0 ? 4 : 1) * kStripColumns, [&](int64_t first, int64_t last) {
        table.scale(call, first * kStripColumns, std::min(count, last * kStripColumns));
    });
}

void spread_gate_heads(Runtime& runtime, const GateHeadsCall& call, int64_t rows) {
    const OperatorTable& table = *operator_table(runtime.isa);
    run_ranges(runtime, rows, 4 * call.columns,
               [&](int64_t first, int64_t last) { table.gate_heads(call, first, last); });
}

void spread_write_pages(Runtime& runtime, const WritePagesCall& keys, const WritePagesCall& values) {
    const OperatorTable& table = *operator_table(runtime.isa);
    const int64_t elements = 4 * keys.tokens * keys.head_dim;  // most go to lines of their own, which are not at hand
    run_ranges(runtime, 2 * keys.kv_heads, elements, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) table.write_pages(i % 2 == 0 ? keys : values, i / 2);
    });
}

}  // namespace mlxr
