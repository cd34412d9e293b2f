// Gate, up and down of a feed-forward block for many tokens: 32 columns of gate and of up are multiplied and activated
// while they are in the cache, and 256 of them quantised, so that between the products there are only quantised
// activations.
#include <algorithm>

#include "linear/call.h"
#include "linear/layout.h"
#include "operators/operator_table.h"

namespace mlxr {

namespace {

using Part = LinearWeight::Part;

constexpr int64_t kPairColumns = 2 * kPanelRows;  // 32 of gate, then 32 of up
// What is quantised at once: a span of the input of down.
constexpr int64_t kRunPairs = kSpanGroups * kGroupColumns / kPanelRows;
constexpr int64_t kRunColumns = kRunPairs * kPanelRows;
// So many tokens at a time: what they have activated, 1 KiB each, stays in the second-level cache beside two panels.
constexpr int64_t kShareTokens = 516;
static_assert(kShareTokens % kTileTokens == 0);
// The last runs are cut in so many shares of tokens, so that the threads end together.
constexpr int64_t kLastRuns = 1;
constexpr int64_t kLastTokens = 84;
static_assert(kLastTokens % kTileTokens == 0);

struct GatedCall {
    const LinearCall& call;  // of gate and up
    const LinearWeight& down;
    Activation kind;
    const QuantizedInput& activated;  // input of down
    int64_t panel_bytes;
};

// Of one thread. Sums are those of a tile, or of all tokens when the panels come in chunks.
struct PairScratch {
    uint8_t* panels;
    float* sums;
    float* activated;  // rows of kRunColumns
};

// Whether all parts are multiplied in groups, and of groups that nothing fills up.
bool is_all_groups(const LinearWeight& weight) {
    return std::none_of(weight.parts().begin(), weight.parts().end(), [&](const Part& part) {
        return is_dense(part.type) || (part.type == Type::f16 && weight.in_features() % kFixedColumns != 0);
    });
}

// Pair `index` of panels for tokens [first_token, last_token), activated; `activated` are its columns of the first.
void multiply_pair(const GatedCall& gated, int64_t index, int64_t first_token, int64_t last_token,
                   const PairScratch& scratch, float* activated) {
    const LinearCall& call = gated.call;
    const Part* const parts = call.weight.parts().data();
    const int64_t chunks = PanelChunks(call, parts[0].type).count;  // depends on the columns alone
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        for (int side = 0; side < 2; ++side) {
            unpack_panel(call, parts[side], index, chunk, scratch.panels + gated.panel_bytes * side);
        }
        for (int64_t first = first_token; first < last_token; first += kTileTokens) {
            const int64_t last = std::min(first + kTileTokens, last_token);
            float* const sums = scratch.sums + (chunks == 1 ? 0 : first - first_token) * kPairColumns;
            for (int side = 0; side < 2; ++side) {
                multiply_panel(call, parts[side], index, chunk, scratch.panels + gated.panel_bytes * side, first, last,
                               sums + kPanelRows * side, kPairColumns);
            }
            if (chunk < chunks - 1) continue;
            float* const out = activated + (first - first_token) * kRunColumns;
            const ActivateCall activate{sums,         sums + kPanelRows, out,         kPanelRows,
                                        kPairColumns, kPairColumns,      kRunColumns, gated.kind};
            operator_table(call.runtime.isa)->activate(activate, 0, last - first, 0, kPanelRows);
        }
    }
}

// Run `run` of pairs, quantised.
void multiply_run(const GatedCall& gated, int64_t run, int64_t first_token, int64_t last_token,
                  const PairScratch& scratch) {
    const int64_t first = run * kRunPairs, last = std::min(first + kRunPairs, panels_of(gated.call.weight.parts()[0]));
    for (int64_t pair = first; pair < last; ++pair) {
        multiply_pair(gated, pair, first_token, last_token, scratch, scratch.activated + (pair - first) * kPanelRows);
    }
    quantize(gated.call.runtime, gated.activated,
             {.x = scratch.activated,
              .x_stride = kRunColumns,
              .columns = (last - first) * kPanelRows,
              .first_token = first_token,
              .last_token = last_token,
              .first_group = first,
              .last_group = last,
              .activations = nullptr});
}

// How runs and tokens are cut into tasks.
struct Tasks {
    Tasks(int64_t tokens_, int64_t runs, int64_t threads_) : tokens(tokens_), threads(threads_) {
        const int64_t last_runs = std::min(runs, kLastRuns * threads);
        whole_runs = runs - last_runs;
        shares = (tokens + kShareTokens - 1) / kShareTokens;
        last_shares = (tokens + kLastTokens - 1) / kLastTokens;
        whole = whole_runs * shares;
        count = whole + last_runs * last_shares;
    }

    // Calls body(run, first token, last token) for a task.
    template <typename Body>
    void visit(int64_t task, const Body& body) const {
        const bool last = task >= whole;
        const int64_t index = last ? task - whole : task, step = last ? kLastTokens : kShareTokens;
        const int64_t cuts = last ? last_shares : shares, first = index % cuts * step;
        body((last ? whole_runs : 0) + index / cuts, first, std::min(tokens, first + step));
    }

    int64_t tokens, threads, whole_runs, shares, last_shares, whole, count;
};

// Gate and up, activated, into the activations of down.
void multiply_runs(const GatedCall& gated) {
    Runtime& runtime = gated.call.runtime;
    const int64_t tokens = gated.call.tokens, threads = runtime.pool.threads();
    const int64_t runs = (panels_of(gated.call.weight.parts()[0]) + kRunPairs - 1) / kRunPairs;
    const Tasks tasks(tokens, runs, threads);
    const int64_t share = std::min(tokens, kShareTokens);
    const int64_t sums_bytes = share * kPairColumns * static_cast<int64_t>(sizeof(float));
    const int64_t activated_bytes = share * kRunColumns * static_cast<int64_t>(sizeof(float));
    const int64_t thread_bytes = 2 * gated.panel_bytes + sums_bytes + activated_bytes;
    std::byte* const scratch = runtime.scratch(Scratch::panels, static_cast<size_t>(thread_bytes * threads));
    runtime.pool.parallel_for(static_cast<int>(tasks.count), [&](int task, int thread) {
        std::byte* const own = scratch + thread_bytes * thread;
        std::byte* const sums = own + 2 * gated.panel_bytes;
        const PairScratch room{reinterpret_cast<uint8_t*>(own), reinterpret_cast<float*>(sums),
                               reinterpret_cast<float*>(sums + sums_bytes)};
        tasks.visit(task,
                    [&](int64_t run, int64_t first, int64_t last) { multiply_run(gated, run, first, last, room); });
    });
}

}  // namespace

bool can_multiply_gated(const LinearWeight& gate_up, const LinearWeight& down, int64_t tokens) {
    if (tokens < kManyTokens || gate_up.parts().size() != 2) return false;
    const Part &gate = gate_up.parts()[0], &up = gate_up.parts()[1];
    return gate.rows == up.rows && gate.rows % kPanelRows == 0 && gate.rows == down.in_features() &&
           is_all_groups(gate_up) && is_all_groups(down);
}

void multiply_gated(Runtime& runtime, const LinearWeight& gate_up, const float* x, int64_t tokens, Activation kind,
                    const LinearWeight& down, float* out, const MakeRows& make_rows) {
    const LinearCall first = begin_call(runtime, gate_up, x, tokens, nullptr, Scratch::activations);
    const LinearCall second = begin_call(runtime, down, nullptr, tokens, out, Scratch::gated);
    {
        Counted counted(runtime.tally, describe_call(first, true));
        counted.does([&] { return measure_call(first); });
        runtime.tally.count({OperatorName::activate, KernelName::fused, static_cast<int>(kind)});
        prepare_together(first, make_rows);
        multiply_runs({first, down, kind, second.input, panel_bytes_of(first)});
    }
    Counted counted(runtime.tally, describe_call(second));
    counted.does([&] { return measure_call(second); });
    multiply_many(second);
}

}  // namespace mlxr
