// See blocks.h.
#include "layers/blocks.h"

#include <algorithm>
#include <utility>

#include "embed/embed.h"
#include "layers/attention_run.h"
#include "layers/mixer_run.h"
#include "layers/registers.h"
#include "layers/spread.h"

namespace mlxr {

namespace {

// A block begins with each layer, where the stream gets what was added to it, and where rows are looked up before all
// blocks.
// Where nothing was added since, a norm of the stream goes on with a block, whose arrays stay.
bool opens_block(const std::vector<Operator>& ops, size_t at) {
    const Operator& op = ops[at];
    if (at == 0 || op.kind == Kind::sum || op.kind == Kind::rows) return true;
    if (op.kind != Kind::norm) return false;
    return op.source == Register::streams ? ops[at - 1].target == Register::streams
                                          : op.source == Register::stream && ops[at - 1].target == Register::delta;
}

constexpr int64_t kArraysEach = 6;  // that an operator takes, at most

// What an operator writes to a block's memory, in numbers of each token, of which the stream has `columns`.
int64_t count_floats(const Layer& layer, const Operator& op, int64_t columns) {
    if (stays(op.target)) return 0;
    const int64_t q = layer.heads * layer.head_dim, k = layer.kv_heads * layer.head_dim;
    switch (op.kind) {
        case Kind::norm:
        case Kind::rows:
            return op.columns;
        case Kind::product:
            return op.weight->out_features();
        case Kind::hadamard:
            return op.hadamard.columns;
        case Kind::rope_and_write_kv:
            return 2 * q + 4 * k;
        case Kind::rope_and_write_latent:
            return 2 * layer.value_dim + layer.head_dim;
        case Kind::project_parts:
            return static_cast<int64_t>(op.parts.size()) * (op.passed + op.parts[0]->out_features());
        case Kind::attend:
            return q;
        case Kind::activate:
            return op.features;
        case Kind::gated_norm:
            return op.gated_norm.columns;
        case Kind::short_conv:
            return op.conv.channels;
        case Kind::gated_delta:
        case Kind::mamba2:
            return op.recurrence.value_heads * op.recurrence.columns;
        case Kind::scan:
            return op.scan.channels;
        case Kind::route:
            return 2 * op.router.used;
        case Kind::mix:
        case Kind::mix_streams:
            return columns;
        case Kind::spread_streams:
            return op.cuts * op.columns;
        case Kind::match_streams:
            return op.cuts;
        case Kind::balance_streams:
        case Kind::blend_streams:
            return op.columns;
        case Kind::level_streams:
            return op.cuts * op.columns;
        case Kind::ngrams:
            return op.ngrams.heads() * (op.columns + 1);
        default:
            return 0;
    }
}

// Runs the operators of layers one after another.
class LayersRun {
  public:
    LayersRun(Runtime& runtime, const LayersCall& call)
        : runtime_(runtime), call_(call), updates_(runtime, call.adapters) {}

    void run(const Layer& layer) {
        attention_.plan(layer);
        const std::vector<Operator>& ops = layer.operators;
        for (size_t i = 0; i < ops.size();) i += run_one(layer, ops, i);
    }

    // The stream and what is to be added to it, normed when a product asks for it.
    void multiply_normed(const Norm& norm, const LinearWeight& weight, float* out) {
        registers_.reserve(call_.columns, 1);
        begin_norm(norm, Register::normed, true);
        product(weight, read(Register::normed), out, take_pending());
    }

  private:
    static constexpr size_t kOne = 1, kThree = 3;
    static constexpr float kLeastMatch = 1e-6f, kLeastSquare = 1e-5f;

    // Memory for all operators from `first` on up to the next block.
    void reserve_block(const Layer& layer, const std::vector<Operator>& ops, size_t first) {
        int64_t floats = 0, arrays = 0;
        for (size_t i = first; i < ops.size() && (i == first || !opens_block(ops, i)); ++i) {
            const bool fused = can_gate(ops, i) || (i > first && can_gate(ops, i - 1));
            floats += fused ? 0 : count_floats(layer, ops[i], call_.columns);
            arrays += kArraysEach;
        }
        registers_.reserve(floats, arrays);
    }

    // Runs operator `at`, perhaps together with those after it; returns how many.
    size_t run_one(const Layer& layer, const std::vector<Operator>& ops, size_t at) {
        const Operator& op = ops[at];
        if (opens_block(ops, at)) reserve_block(layer, ops, at);
        switch (op.kind) {
            case Kind::norm:
                if (op.source == Register::stream) {
                    begin_norm(op.norm, op.target, op.target == Register::normed && feeds_product(ops, at));
                } else {
                    norm_rows(op);
                }
                return kOne;
            case Kind::sum:
                if (registers_.has_delta()) {
                    spread_add(runtime_, {call_.stream, call_.delta, call_.stream, op.factor},
                               call_.tokens * call_.columns);
                }
                registers_.drop_delta();
                return kOne;
            case Kind::product:
                return run_product(ops, at);
            case Kind::rope_and_write_kv:
                attention_.rope_and_write_kv(layer, op);
                return kOne;
            case Kind::rope_and_write_latent:
                attention_.rope_and_write_latent(layer, op);
                return kOne;
            case Kind::attend:
                attention_.attend(layer);
                return kOne;
            case Kind::project_parts: {
                const int64_t columns = op.passed + op.parts[0]->out_features();
                const float* const source = read(op.source);
                float* const target = write(op.target, static_cast<int64_t>(op.parts.size()) * columns);
                multiply_parts(runtime_, {op.parts, source, target, call_.tokens, op.passed});
                return kOne;
            }
            case Kind::activate:
                activate(op, feeds_product(ops, at));
                return kOne;
            case Kind::hadamard:
                transform(ops, at);
                return kOne;
            case Kind::scale: {
                float* const x = find(op.target);
                spread_scale(runtime_, {x, x, op.factor, op.softcap}, call_.tokens * op.columns);
                return kOne;
            }
            case Kind::join: {
                float* const sum = find(op.target);
                spread_add(runtime_, {sum, read(op.source), sum, op.factor}, call_.tokens * op.columns);
                return kOne;
            }
            case Kind::mix_streams: {
                const float *const kept = read(Register::kept), *const gates = read(Register::x);
                run_streams(runtime_, MixStreamsCall{kept, gates, write(op.target, op.columns), op.cuts, op.columns},
                            call_.tokens);
                return kOne;
            }
            case Kind::spread_streams:
                spread_over_streams(op);
                return kOne;
            case Kind::match_streams: {
                const float *const keys = read(Register::x), *const queries = read(Register::kept);
                float* const out = write(op.target, op.cuts);
                run_streams(runtime_,
                            MatchStreamsCall{keys, queries, out, op.cuts, op.columns, op.gate_scale, kLeastMatch},
                            call_.tokens);
                return kOne;
            }
            case Kind::balance_streams: {
                BalanceStreamsCall call = op.balance;
                call.x = read(Register::x);
                call.out = write(op.target, op.columns);
                run_streams(runtime_, call, call_.tokens);
                return kOne;
            }
            case Kind::blend_streams: {
                const float *const streams = find(Register::streams), *const added =
                                                                          op.adds ? read(op.source) : nullptr;
                const float* const gains = op.has_gains ? read(Register::gains) : nullptr;
                float* const out = op.adds ? find(op.target) : write(op.target, op.columns);
                run_streams(runtime_, BlendStreamsCall{streams, gains, added, out, op.cuts, op.columns}, call_.tokens);
                if (op.adds && op.source == Register::delta) registers_.drop_delta();
                return kOne;
            }
            case Kind::level_streams: {
                const float *const x = read(Register::x), *const base = read(Register::stream);
                float* const out = write(op.target, op.cuts * op.columns);
                run_streams(runtime_, LevelStreamsCall{x, base, out, op.cuts, op.columns, kLeastSquare}, call_.tokens);
                return kOne;
            }
            case Kind::cut_gates: {
                float* const x = find(Register::x);
                spread_cut_gates(runtime_, {x, registers_.columns(Register::x), x, op.features, op.factor},
                                 call_.tokens);
                return kOne;
            }
            case Kind::ngrams:
                look_up_ngrams(layer, op);
                return kOne;
            case Kind::route:
                route(op);
                return kOne;
            case Kind::mix: {
                const float* const source = read(op.source);
                run_mix(runtime_, *op.experts,
                        {source, chosen_, shares_, call_.tokens, used_, write(op.target, op.experts->columns()),
                         call_.adapters});
                return kOne;
            }
            case Kind::gate_rows: {
                float* const gated_rows = find(op.target);
                spread_gate_heads(runtime_, {gated_rows, read(Register::x), gated_rows, op.columns, 1, false},
                                  call_.tokens);
                return kOne;
            }
            case Kind::take_shares:
                take_shares(op);
                return kOne;
            case Kind::rows:
                embed(runtime_, op.table.type, op.table.data, op.columns, call_.token_ids, call_.tokens,
                      write(op.target, op.columns));
                return kOne;
            case Kind::gate_heads: {
                float* const x = find(Register::x);
                const int64_t columns = registers_.columns(Register::x);
                spread_gate_heads(runtime_, {x, read(Register::kept), x, columns, op.kept_columns, op.softplus},
                                  call_.tokens);
                return kOne;
            }
            case Kind::gated_norm:
                mixer_.gate_and_norm(op);
                return kOne;
            case Kind::short_conv:
                mixer_.convolve(layer, op);
                return kOne;
            case Kind::gated_delta:
            case Kind::mamba2:
                mixer_.recur(layer, op);
                return kOne;
            case Kind::scan:
                mixer_.scan(layer, op);
                return kOne;
        }
        return kOne;
    }

    // A product, or three operators in one go.
    size_t run_product(const std::vector<Operator>& ops, size_t at) {
        const Operator& op = ops[at];
        const MakeRows make = take_pending();
        const float* const source = read(op.source);
        if (can_gate(ops, at)) {
            const LinearWeight& down = *ops[at + 2].weight;
            float* const target = write(ops[at + 2].target, down.out_features());
            const Operator& between = ops[at + 1];
            multiply_gated(runtime_, *op.weight, source, call_.tokens, between.activation, between.parameters, down,
                           target, make);
            return kThree;
        }
        product(*op.weight, source, write(op.target, op.weight->out_features()), make);
        return kOne;
    }

    // A product, and what adapters add to it.
    void product(const LinearWeight& weight, const float* x, float* out, const MakeRows& make) {
        multiply(runtime_, weight, x, call_.tokens, out, make, updates_.begin(weight, x, out));
        updates_.finish();
    }

    // Whether the product at `at`, the activation and the product after it can be done in one go.
    bool can_gate(const std::vector<Operator>& ops, size_t at) const {
        return call_.adapters.empty() && at + 2 < ops.size() && ops[at].kind == Kind::product &&
               ops[at + 1].kind == Kind::activate && ops[at + 1].gated && ops[at + 2].kind == Kind::product &&
               can_multiply_gated(*ops[at].weight, *ops[at + 2].weight, call_.tokens);
    }

    // Whether a product that comes next reads what an operator writes, or reads a transform of it.
    static bool feeds_product(const std::vector<Operator>& ops, size_t at) {
        Register made = ops[at].target;
        size_t next = at + 1;
        if (next < ops.size() && ops[next].kind == Kind::hadamard && ops[next].source == made) {
            made = ops[next].target;
            ++next;
        }
        return next < ops.size() && ops[next].kind == Kind::product && ops[next].source == made;
    }

    // The product that follows makes the rows itself, as it makes those that they are made of.
    void transform(const std::vector<Operator>& ops, size_t at) {
        const Operator& op = ops[at];
        MakeRows make_x = take_pending();
        HadamardCall call = op.hadamard;
        call.x = read(op.source);
        call.out = write(op.target, call.columns);
        if (at + 1 < ops.size() && ops[at + 1].kind == Kind::product && ops[at + 1].source == op.target) {
            pending_ = fuse_hadamard(runtime_, call, std::move(make_x));
            return;
        }
        if (make_x != nullptr) make_x(0, call_.tokens);
        spread_hadamard(runtime_, call, call_.tokens);
    }

    // With `fuses` the next product makes the rows of its input itself. The stream may be normed in its place.
    void begin_norm(const Norm& norm, Register target, bool fuses) {
        const float* const residual = registers_.has_delta() ? call_.delta : nullptr;
        float* const normed = write(target, call_.columns);
        registers_.drop_delta();
        if (norm.is_layer_norm) {
            const LayerNormCall step{call_.stream, residual,     norm.weight,   norm.bias,
                                     normed,       call_.stream, call_.columns, norm.eps};
            if (fuses) {
                pending_ = fuse_layer_norm(runtime_, step);
            } else {
                spread_layer_norm(runtime_, step, call_.tokens);
            }
        } else {
            const RmsNormCall step{call_.stream, residual, norm.weight, normed, call_.stream, call_.columns, norm.eps};
            if (fuses) {
                pending_ = fuse_rms_norm(runtime_, step);
            } else {
                spread_rms_norm(runtime_, step, call_.tokens);
            }
        }
    }

    MakeRows take_pending() {
        MakeRows taken = std::move(pending_);
        pending_ = nullptr;
        return taken;
    }

    void norm_rows(const Operator& op) {
        const float* const source = read(op.source);
        float* const target = write(op.target, op.columns);
        const int64_t rows = call_.tokens * op.cuts, columns = op.columns / op.cuts;
        if (op.norm.is_layer_norm) {
            spread_layer_norm(
                runtime_, {source, nullptr, op.norm.weight, op.norm.bias, target, nullptr, columns, op.norm.eps}, rows);
        } else {
            RmsNormCall call{source, nullptr, op.norm.weight, target, nullptr, columns, op.norm.eps};
            call.weight_rows = op.weight_rows;
            spread_rms_norm(runtime_, call, rows);
        }
    }

    // What a block gives is taken out of the delta, so that nothing is left to add.
    void spread_over_streams(const Operator& op) {
        const float *const source = read(op.source), *const gates = op.has_gains ? read(Register::gains) : nullptr;
        float* const out = op.adds ? find(op.target) : write(op.target, op.cuts * op.columns);
        run_streams(runtime_,
                    SpreadStreamsCall{source, gates, op.adds ? out : nullptr, out, op.cuts, op.columns, op.factor,
                                      op.gate_scale},
                    call_.tokens);
        if (op.source == Register::delta) registers_.drop_delta();
    }

    void look_up_ngrams(const Layer& layer, const Operator& op) {
        NgramCall call = op.ngrams;
        call.ids = call_.token_ids;
        call.states = {layer.states,       layer.slot_floats, call.states.first, call_.state_reads,
                       call_.state_writes, call_.starts,      call_.sequences};
        call.rows = reinterpret_cast<int32_t*>(registers_.take(call.heads()));
        find_ngrams(call);
        embed(runtime_, op.table.type, op.table.data, op.columns, call.rows, call_.tokens * call.heads(),
              write(op.target, call.heads() * op.columns));
    }

    void route(const Operator& op) {
        RouteCall call = op.router;
        used_ = call.used;
        chosen_ = reinterpret_cast<int32_t*>(registers_.take(used_));
        shares_ = registers_.take(used_);
        call.logits = read(Register::x);
        call.chosen = chosen_;
        call.shares = shares_;
        run_route(runtime_, call, call_.tokens);
    }

    // Of a token with one expert, whose input has the share then.
    void take_shares(const Operator& op) {
        const float* const source = read(op.source);
        float* const target = write(op.target, op.columns);
        for (int64_t token = 0; token < call_.tokens; ++token) {
            for (int64_t at = token * op.columns; at < (token + 1) * op.columns; ++at) {
                target[at] = source[at] * shares_[token];
            }
            shares_[token] = 1.0f;
        }
    }

    // With `fuses` the next product makes the rows of its input itself.
    void activate(const Operator& op, bool fuses) {
        const int64_t x_columns = (op.gated ? 2 : 1) * op.features;
        const float* const source = read(Register::x);
        ActivateCall call{source,      nullptr,       write(Register::x, op.features),
                          op.features, x_columns,     0,
                          op.features, op.activation, op.parameters};
        if (op.gated) {
            call.up = source + op.features;
            call.up_stride = x_columns;
        } else if (op.first >= 0) {
            call.up = read(Register::inputs) + op.first;
            call.up_stride = op.columns;
        }
        if (fuses) {
            pending_ = fuse_activate(runtime_, call);
        } else {
            spread_activate(runtime_, call, call_.tokens);
        }
    }

    float* find(Register place) const { return registers_.find(place); }
    const float* read(Register place) const { return registers_.find(place); }
    float* write(Register place, int64_t columns) { return registers_.write(place, columns); }

    Runtime& runtime_;
    const LayersCall& call_;
    ProductUpdates updates_;
    Registers registers_{runtime_, call_};
    AttentionRun attention_{runtime_, call_, registers_};
    MixerRun mixer_{runtime_, call_, registers_};
    int64_t used_ = 0;  // experts of a token
    int32_t* chosen_ = nullptr;
    float* shares_ = nullptr;
    MakeRows pending_ = nullptr;
};

}  // namespace

void run_layers(Runtime& runtime, const Layer* layers, int64_t count, const LayersCall& call) {
    LayersRun run(runtime, call);
    for (int64_t i = 0; i < count; ++i) run.run(layers[i]);
}

namespace {

// Up to so many tokens a step waits for memory; and then so much is read before the next one, at most: it should fit
// into a third-level cache.
constexpr int64_t kFewTokens = 8;
constexpr size_t kAheadBytes = size_t{24} << 20;

// The weights that a step begins with.
Stretches first_weights(const Model& model) {
    Stretches first;
    size_t left = kAheadBytes;
    for (int64_t i = 0; i < model.count && left > 0; ++i) {
        for (const Operator& op : model.layers[i].operators) {
            if (op.kind != Kind::product) continue;
            for (const LinearWeight::Part& part : op.weight->parts()) {
                const size_t bytes = std::min(left, part.memory.bytes());
                first.add(part.memory.data(), bytes);
                left -= bytes;
            }
        }
    }
    return first;
}

}  // namespace

void run_model(Runtime& runtime, const Model& model, const LayersCall& call, float* logits) {
    LayersRun run(runtime, call);
    for (int64_t i = 0; i < model.count; ++i) run.run(model.layers[i]);
    if (call.tokens <= kFewTokens) runtime.pool.fetch_after_next(first_weights(model));
    run.multiply_normed(model.head.norm, *model.head.output, logits);
}

}  // namespace mlxr
