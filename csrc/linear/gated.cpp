// Gate, up and down of a feed-forward block for many tokens: 32 columns of gate and of up are multiplied and activated
// while they are in the cache, and 256 of them quantised, so that between the products there are only quantised
// activations.
#include <algorithm>
#include <utility>

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
constexpr int64_t kLastRunTokens = 84;
static_assert(kLastRunTokens % kTileTokens == 0);

// Of one thread. Sums are those of a panel kernel's tokens, or of all tokens when the panels come in chunks.
struct PairScratch {
    uint8_t* panels;
    int64_t panel_bytes;
    float* sums;
    float* activated;  // rows of kRunColumns
};

// Whether all parts are multiplied in groups, and of groups that nothing fills up.
bool is_all_groups(const LinearWeight& weight) {
    return std::none_of(weight.parts().begin(), weight.parts().end(), [&](const Part& part) {
        return is_dense(part.type) || (part.type == Type::f16 && weight.in_features() % kFixedColumns != 0);
    });
}

// Both panels of a pair, one chunk.
Upcoming expect_pair(const LinearCall& call, int64_t index, int64_t chunk) {
    Upcoming pair;
    for (int side = 0; side < 2; ++side) pair.add(call, call.weight.parts()[static_cast<size_t>(side)], index, chunk);
    return pair;
}

// Pair `index` of panels for tokens [first_token, last_token), activated; `activated` are its columns of the first.
// `next` comes afterwards.
void multiply_pair(const GatedCall& gated, int64_t index, int64_t first_token, int64_t last_token, const Upcoming& next,
                   const PairScratch& scratch, float* activated) {
    const LinearCall& call = gated.gate_up;
    const Part* const parts = call.weight.parts().data();
    const int64_t chunks = PanelChunks(call, parts[0].type).count;  // depends on the columns alone
    const int64_t most =
        std::min(kernels_of(call, parts[0].type).panel_tokens, kernels_of(call, parts[1].type).panel_tokens);
    const int64_t steps = (last_token - first_token + most - 1) / most;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const Upcoming upcoming = chunk + 1 < chunks ? expect_pair(call, index, chunk + 1) : next;
        for (int side = 0; side < 2; ++side) {
            unpack_panel(call, parts[side], index, chunk, scratch.panels + scratch.panel_bytes * side);
        }
        for (int64_t first = first_token; first < last_token; first += most) {
            const int64_t last = std::min(first + most, last_token);
            float* const sums = scratch.sums + (chunks == 1 ? 0 : first - first_token) * kPairColumns;
            for (int side = 0; side < 2; ++side) {
                upcoming.fetch((first - first_token) / most * 2 + side, 2 * steps);
                multiply_panel(call, parts[side], index, chunk, scratch.panels + scratch.panel_bytes * side, first,
                               last, sums + kPanelRows * side, kPairColumns);
            }
            if (chunk < chunks - 1) continue;
            float* const out = activated + (first - first_token) * kRunColumns;
            const ActivateCall activate{sums,         sums + kPanelRows, out,        kPanelRows,      kPairColumns,
                                        kPairColumns, kRunColumns,       gated.kind, gated.parameters};
            operator_table(call.runtime.isa)->activate(activate, 0, last - first, 0, kPanelRows);
        }
    }
}

// Run `run` of pairs, quantised. `next` comes afterwards.
void multiply_run(const GatedCall& gated, int64_t run, int64_t first_token, int64_t last_token, const Upcoming& next,
                  const PairScratch& scratch) {
    const int64_t first = run * kRunPairs,
                  last = std::min(first + kRunPairs, panels_of(gated.gate_up.weight.parts()[0]));
    for (int64_t pair = first; pair < last; ++pair) {
        const Upcoming upcoming = pair + 1 < last ? expect_pair(gated.gate_up, pair + 1, 0) : next;
        multiply_pair(gated, pair, first_token, last_token, upcoming, scratch,
                      scratch.activated + (pair - first) * kPanelRows);
    }
    quantize(gated.gate_up.runtime, gated.down.input,
             {.x = scratch.activated,
              .x_stride = kRunColumns,
              .columns = (last - first) * kPanelRows,
              .first_token = first_token,
              .last_token = last_token,
              .first_group = first,
              .last_group = last,
              .activations = nullptr});
}

}  // namespace

bool can_gate(const LinearWeight& gate_up, const LinearWeight& down, int64_t tokens) {
    if (tokens < kManyTokens || gate_up.parts().size() != 2) return false;
    const Part &gate = gate_up.parts()[0], &up = gate_up.parts()[1];
    return gate.rows == up.rows && gate.rows % kPanelRows == 0 && gate.rows == down.in_features() &&
           is_all_groups(gate_up) && is_all_groups(down);
}

GatedTasks::GatedTasks(std::vector<GatedCall> calls, int threads) : calls_(std::move(calls)) {
    const auto runs_of = [](const GatedCall& call) {
        return (panels_of(call.gate_up.weight.parts()[0]) + kRunPairs - 1) / kRunPairs;
    };
    int64_t left = 0;
    for (const GatedCall& call : calls_) {
        panel_bytes_ = std::max(panel_bytes_, panel_bytes_of(call.gate_up));
        most_tokens_ = std::max(most_tokens_, std::min(call.gate_up.tokens(), kShareTokens));
        left += runs_of(call);
    }
    for (size_t i = 0; i < calls_.size(); ++i) {
        const int64_t tokens = calls_[i].gate_up.tokens();
        for (int64_t run = 0; run < runs_of(calls_[i]); ++run, --left) {
            const int64_t step = left <= kLastRuns * threads ? kLastRunTokens : kShareTokens;
            for (int64_t first = 0; first < tokens; first += step) {
                runs_.push_back({i, run, first, std::min(tokens, first + step)});
            }
        }
    }
}

int64_t GatedTasks::scratch_bytes() const {
    return 2 * panel_bytes_ + most_tokens_ * (kPairColumns + kRunColumns) * static_cast<int64_t>(sizeof(float));
}

// Gate and up, activated, into the activations of down.
void GatedTasks::run(int task, int next, std::byte* scratch) const {
    const Run& run = runs_[static_cast<size_t>(task)];
    Upcoming upcoming;
    if (next < count()) {
        const Run& after = runs_[static_cast<size_t>(next)];
        upcoming = expect_pair(calls_[after.call].gate_up, after.index * kRunPairs, 0);
    }
    float* const sums = reinterpret_cast<float*>(scratch + 2 * panel_bytes_);
    const PairScratch room{reinterpret_cast<uint8_t*>(scratch), panel_bytes_, sums, sums + most_tokens_ * kPairColumns};
    multiply_run(calls_[run.call], run.index, run.first_token, run.last_token, upcoming, room);
    end_panels(calls_[run.call].gate_up);
}

bool can_multiply_gated(const LinearWeight& gate_up, const LinearWeight& down, int64_t tokens) {
    return can_gate(gate_up, down, tokens);
}

void multiply_gated(Runtime& runtime, const LinearWeight& gate_up, const float* x, int64_t tokens, Activation kind,
                    const ActivationParameters& parameters, const LinearWeight& down, float* out,
                    const MakeRows& make_rows) {
    const LinearCall first = begin_call(runtime, gate_up, x, tokens, nullptr, Scratch::activations);
    const LinearCall second = begin_call(runtime, down, nullptr, tokens, out, Scratch::gated);
    {
        Ran ran(OperatorName::linear);
        describe_call(first, true, ran);
        Counted counted(runtime.tally, ran);
        counted.does([&] { return measure_call(first); });
        runtime.tally.count({OperatorName::activate, KernelName::fused, static_cast<int>(kind)});
        prepare_together(first, make_rows);
        const GatedTasks tasks({{first, second, kind, parameters}}, runtime.pool.threads());
        std::byte* const scratch =
            runtime.scratch(Scratch::panels, static_cast<size_t>(tasks.scratch_bytes() * runtime.pool.threads()));
        const int threads = runtime.pool.threads();
        runtime.pool.parallel_for(tasks.count(), [&](int task, int thread) {
            tasks.run(task, task + threads, scratch + tasks.scratch_bytes() * thread);
        });
    }
    Ran ran(OperatorName::linear);
    describe_call(second, false, ran);
    Counted counted(runtime.tally, ran);
    counted.does([&] { return measure_call(second); });
    multiply_many(second);
}

}  // namespace mlxr
