// Gate, up and down of a feed-forward block for many tokens: 32 columns of gate and of up are multiplied, activated and
// quantised while they are in the cache, so that between the products there are only quantised activations.
#include <algorithm>

#include "linear/call.h"
#include "linear/layout.h"
#include "operator_table.h"

namespace mlxr {

namespace {

using Part = LinearWeight::Part;

constexpr int64_t kPairColumns = 2 * kPanelRows;  // 32 of gate, then 32 of up
// So many tokens at a time: their sums, 256 bytes each, stay in the second-level cache beside two panels.
constexpr int64_t kShareTokens = 516;
static_assert(kShareTokens % kTileTokens == 0);
// The last pairs of panels are cut in so many shares of tokens, so that the threads end together.
constexpr int64_t kLastPairs = 4;
constexpr int64_t kLastTokens = 132;
static_assert(kLastTokens % kTileTokens == 0);

struct GatedCall {
    const LinearCall& call;  // of gate and up
    const LinearWeight& down;
    Activation kind;
    const Activations& activated;  // input of down
    int64_t panel_bytes;
};

// Pair `index` of panels for tokens [first, last): sums of a tile, or of all tokens when the panels come in chunks.
struct PairScratch {
    uint8_t* panels;
    float* sums;
};

// Whether all parts are multiplied in groups, and of groups that nothing fills up.
bool is_all_groups(const LinearWeight& weight) {
    return std::none_of(weight.parts().begin(), weight.parts().end(), [&](const Part& part) {
        return is_dense(part.type) || (part.type == Type::f16 && weight.in_features() % kFixedColumns != 0);
    });
}

void activate_tile(const GatedCall& gated, int64_t index, int64_t first, int64_t last, const float* sums) {
    alignas(64) float activated[kTileTokens * kPanelRows];
    const ActivateCall activate{sums, activated, kPanelRows, gated.kind};
    operator_table(gated.call.runtime.isa)->activate(activate, 0, last - first, 0, kPanelRows);
    quantize(gated.call.runtime, {.x = activated,
                                  .x_stride = kPanelRows,
                                  .columns = kPanelRows,
                                  .first_token = first,
                                  .last_token = last,
                                  .first_group = index,
                                  .last_group = index + 1,
                                  .activations = &gated.activated});
}

void multiply_pair(const GatedCall& gated, int64_t index, int64_t first_token, int64_t last_token,
                   const PairScratch& scratch) {
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
            if (chunk == chunks - 1) activate_tile(gated, index, first, last, sums);
        }
    }
}

// How pairs and tokens are cut into tasks.
struct Tasks {
    Tasks(int64_t tokens_, int64_t pairs, int64_t threads_) : tokens(tokens_), threads(threads_) {
        const int64_t last_pairs = std::min(pairs, kLastPairs * threads);
        whole_pairs = pairs - last_pairs;
        far = (whole_pairs + threads - 1) / threads;
        shares = (tokens + kShareTokens - 1) / kShareTokens;
        last_shares = (tokens + kLastTokens - 1) / kLastTokens;
        whole = far * threads * shares;
        count = whole + last_pairs * last_shares;
    }

    // Calls body(pair, first token, last token) for a task, which may be none. Threads that start together get pairs
    // far apart, as neighbours write to the same lines of the activations.
    template <typename Body>
    void visit(int64_t task, const Body& body) const {
        if (task < whole) {
            const int64_t turn = task % (far * threads), first = task / (far * threads) * kShareTokens;
            const int64_t pair = turn % threads * far + turn / threads;
            if (pair < whole_pairs) body(pair, first, std::min(tokens, first + kShareTokens));
        } else {
            const int64_t rest = task - whole, first = rest % last_shares * kLastTokens;
            body(whole_pairs + rest / last_shares, first, std::min(tokens, first + kLastTokens));
        }
    }

    int64_t tokens, threads, whole_pairs, far, shares, last_shares, whole, count;
};

// Gate and up, activated, into the activations of down.
void multiply_pairs(const GatedCall& gated) {
    Runtime& runtime = gated.call.runtime;
    const int64_t tokens = gated.call.tokens, threads = runtime.pool.threads();
    const Tasks tasks(tokens, panels_of(gated.call.weight.parts()[0]), threads);
    const int64_t sums_bytes = std::min(tokens, kShareTokens) * kPairColumns * static_cast<int64_t>(sizeof(float));
    const int64_t thread_bytes = 2 * gated.panel_bytes + sums_bytes;
    std::byte* const scratch = runtime.scratch(Scratch::panels, static_cast<size_t>(thread_bytes * threads));
    runtime.pool.parallel_for(static_cast<int>(tasks.count), [&](int task, int thread) {
        std::byte* const own = scratch + thread_bytes * thread;
        const PairScratch room{reinterpret_cast<uint8_t*>(own), reinterpret_cast<float*>(own + 2 * gated.panel_bytes)};
        tasks.visit(task,
                    [&](int64_t pair, int64_t first, int64_t last) { multiply_pair(gated, pair, first, last, room); });
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
    prepare_together(first, make_rows);
    multiply_pairs({first, down, kind, second.activations, panel_bytes_of(first)});
    multiply_many(second);
}

}  // namespace mlxr
