// See blocks.h.
#include "layers/blocks.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "attend/attend.h"
#include "embed/embed.h"
#include "layers/spread.h"
#include "mixers/spread_mixers.h"

namespace mlxr {

namespace {

// Consecutive arrays of scratch memory.
class Arrays {
  public:
    Arrays(Runtime& runtime, int64_t floats, int64_t arrays)
        : next_(reinterpret_cast<float*>(
              runtime.scratch(Scratch::blocks, static_cast<size_t>(floats + 16 * arrays) * sizeof(float)))) {}

    float* take(int64_t floats) {
        float* const taken = next_;
        next_ += (floats + 15) / 16 * 16;
        return taken;
    }

  private:
    float* next_;
};

// Heads of all tokens, some columns of a fused product.
struct Heads {
    float* x;
    int64_t stride, count;
};

// A block begins where the stream gets what was added to it, or where rows are looked up before all blocks.
// Where nothing was added since, a norm of the stream goes on with a block, whose arrays stay.
bool opens_block(const std::vector<Operator>& ops, size_t at) {
    const Operator& op = ops[at];
    if (op.kind == Kind::sum || op.kind == Kind::rows) return true;
    if (op.kind != Kind::norm || op.source != Register::stream) return false;
    return at == 0 || ops[at - 1].target == Register::delta;
}

// Whether what is written there has its own memory, which stays when the block ends.
bool stays(Register place) {
    return place == Register::delta || place == Register::inputs;
}

// Runs the operators of layers one after another.
class LayersRun {
  public:
    LayersRun(Runtime& runtime, const LayersCall& call) : runtime_(runtime), call_(call) {}

    void run(const Layer& layer) {
        plan(layer);
        const std::vector<Operator>& ops = layer.operators;
        for (size_t i = 0; i < ops.size();) i += run_one(layer, ops, i);
    }

    // The stream and what is to be added to it, normed when a product asks for it.
    void multiply_normed(const Norm& norm, const LinearWeight& weight, float* out) {
        reserve(call_.columns, 1);
        normed_ = arrays_->take(call_.tokens * call_.columns);
        begin_norm(norm, true);
        product(weight, normed_, out, take_pending());
    }

  private:
    static constexpr size_t kOne = 1, kThree = 3;

    // Attention of consecutive layers alike is planned once.
    void plan(const Layer& layer) {
        if (layer.heads == 0) return;
        if (planned_ != nullptr && planned_->window == layer.window && planned_->group == layer.group &&
            planned_->heads == layer.heads) {
            planned_ = &layer;
            return;
        }
        planned_ = &layer;
        AttendCall attend = call_.groups[static_cast<size_t>(layer.group)].attend;
        attend.heads = layer.heads;
        attend.group = layer.heads / layer.kv_heads;
        attend.window = layer.window;
        plan_ = plan_attend(runtime_, attend, call_.sequences);
    }

    // Memory for the arrays of a block, in place of that of the block before.
    void reserve(int64_t floats, int64_t arrays) { arrays_.emplace(runtime_, call_.tokens * floats, arrays); }

    // Memory for all operators from `first` on up to the next block.
    void reserve_block(const Layer& layer, const std::vector<Operator>& ops, size_t first, bool gated) {
        int64_t floats = 0, arrays = 0;
        for (size_t i = first; i < ops.size() && (i == first || !opens_block(ops, i)); ++i) {
            const int64_t q = layer.heads * layer.head_dim, k = layer.kv_heads * layer.head_dim;
            switch (ops[i].kind) {
                case Kind::norm:
                case Kind::rows:
                    floats += stays(ops[i].target) ? 0 : ops[i].columns;
                    break;
                case Kind::product:
                    if (stays(ops[i].target)) break;
                    if (gated && i + 1 < ops.size() && ops[i + 1].kind == Kind::activate) break;
                    floats += ops[i].weight->out_features();
                    break;
                case Kind::split_heads:
                    floats += 2 * q + 4 * k;
                    break;
                case Kind::attend:
                    floats += q;
                    break;
                case Kind::activate:
                    floats += gated ? 0 : ops[i].features;
                    break;
                case Kind::gated_norm:
                    floats += ops[i].gated_norm.columns;
                    break;
                case Kind::short_conv:
                    floats += ops[i].conv.channels;
                    break;
                case Kind::gated_delta:
                case Kind::mamba2:
                    floats += ops[i].recurrence.value_heads * ops[i].recurrence.columns;
                    break;
                case Kind::route:
                    floats += 2 * ops[i].router.used;
                    break;
                case Kind::mix:
                    floats += stays(ops[i].target) ? 0 : call_.columns;
                    break;
                default:
                    break;
            }
            arrays += 6;
        }
        reserve(floats, arrays);
    }

    // Runs operator `at`, perhaps together with those after it; returns how many.
    size_t run_one(const Layer& layer, const std::vector<Operator>& ops, size_t at) {
        const Operator& op = ops[at];
        const bool gated = can_gate(ops, op.kind == Kind::product ? at : at + 1);
        if (opens_block(ops, at)) reserve_block(layer, ops, at, gated);
        switch (op.kind) {
            case Kind::norm:
                if (op.source == Register::stream) {
                    normed_ = arrays_->take(call_.tokens * call_.columns);
                    begin_norm(op.norm, at + 1 < ops.size() && ops[at + 1].kind == Kind::product);
                    has_delta_ = false;
                } else {
                    norm_rows(op);
                }
                return kOne;
            case Kind::sum:
                if (has_delta_) {
                    spread_add(runtime_, {call_.stream, call_.delta, call_.stream, op.factor},
                               call_.tokens * call_.columns);
                }
                has_delta_ = false;
                return kOne;
            case Kind::product: {
                const MakeRows make = take_pending();
                if (gated) {
                    const Operator& down = ops[at + 2];
                    multiply_gated(runtime_, *op.weight, read(op.source), call_.tokens, ops[at + 1].activation,
                                   *down.weight, write(down.target, down.weight->out_features()), make);
                    return kThree;
                }
                const float* const source = read(op.source);
                float* const target = write(op.target, op.weight->out_features());
                product(*op.weight, source, target, make);
                return kOne;
            }
            case Kind::split_heads:
                split_heads(layer, op);
                return kOne;
            case Kind::attend:
                attend(layer);
                return kOne;
            case Kind::activate:
                activate(op);
                return kOne;
            case Kind::scale: {
                float* const x = find(op.target);
                spread_scale(runtime_, {x, x, op.factor, 0.0f}, call_.tokens * op.columns);
                return kOne;
            }
            case Kind::join: {
                float* const sum = find(op.target);
                spread_add(runtime_, {sum, other_, sum, op.factor}, call_.tokens * op.columns);
                return kOne;
            }
            case Kind::route:
                route(op);
                return kOne;
            case Kind::mix: {
                const float* const source = read(op.source);
                run_mix(runtime_, *op.experts,
                        {source, chosen_, shares_, call_.tokens, used_, write(op.target, call_.columns)});
                return kOne;
            }
            case Kind::gate_rows: {
                float* const gated_rows = find(op.target);
                spread_gate_heads(runtime_, {gated_rows, x_, gated_rows, op.columns, 1}, call_.tokens);
                return kOne;
            }
            case Kind::rows:
                embed(runtime_, op.table.type, op.table.data, op.columns, call_.token_ids, call_.tokens,
                      write(op.target, op.columns));
                return kOne;
            case Kind::gate_heads:
                spread_gate_heads(runtime_, {x_, kept_, x_, x_columns_, op.kept_columns}, call_.tokens);
                return kOne;
            case Kind::gated_norm:
                gate_and_norm(op);
                return kOne;
            case Kind::short_conv:
                convolve(layer, op);
                return kOne;
            case Kind::gated_delta:
            case Kind::mamba2:
                recur(layer, op);
                return kOne;
        }
        return kOne;
    }

    // A product, and what adapters add to it.
    void product(const LinearWeight& weight, const float* x, float* out, const MakeRows& make) {
        multiply(runtime_, weight, x, call_.tokens, out, make);
        update_product(runtime_, weight, call_.adapters, x, out);
    }

    // Whether the product at `at`, the activation and the product after it can be done in one go.
    bool can_gate(const std::vector<Operator>& ops, size_t at) const {
        return call_.adapters.empty() && at + 2 < ops.size() && ops[at].kind == Kind::product &&
               ops[at + 1].kind == Kind::activate && ops[at + 1].gated && ops[at + 2].kind == Kind::product &&
               can_multiply_gated(*ops[at].weight, *ops[at + 2].weight, call_.tokens);
    }

    // With `fuses` the next product makes the rows of its input itself.
    void begin_norm(const Norm& norm, bool fuses) {
        const float* const residual = has_delta_ ? call_.delta : nullptr;
        if (norm.is_layer_norm) {
            const LayerNormCall step{call_.stream, residual,     norm.weight,   norm.bias,
                                     normed_,      call_.stream, call_.columns, norm.eps};
            if (fuses) {
                pending_ = fuse_layer_norm(runtime_, step);
            } else {
                spread_layer_norm(runtime_, step, call_.tokens);
            }
        } else {
            const RmsNormCall step{call_.stream, residual, norm.weight, normed_, call_.stream, call_.columns, norm.eps};
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
        const int64_t rows = call_.tokens * op.parts, columns = op.columns / op.parts;
        if (op.norm.is_layer_norm) {
            spread_layer_norm(
                runtime_, {source, nullptr, op.norm.weight, op.norm.bias, target, nullptr, columns, op.norm.eps}, rows);
        } else {
            spread_rms_norm(runtime_, {source, nullptr, op.norm.weight, target, nullptr, columns, op.norm.eps}, rows);
        }
    }

    float* find(Register place) const {
        switch (place) {
            case Register::stream:
                return call_.stream;
            case Register::delta:
                return call_.delta;
            case Register::normed:
                return normed_;
            case Register::x:
                return x_;
            case Register::inputs:
                return inputs_;
            case Register::kept:
                return kept_;
            default:
                return other_;
        }
    }

    const float* read(Register place) const { return find(place); }

    // Where an operator writes `columns` numbers of each token.
    float* write(Register place, int64_t columns) {
        if (place == Register::delta) {
            has_delta_ = true;
            return call_.delta;
        }
        if (place == Register::inputs) {
            const size_t bytes = static_cast<size_t>(call_.tokens * columns) * sizeof(float);
            return inputs_ = reinterpret_cast<float*>(runtime_.scratch(Scratch::inputs, bytes));
        }
        float* const taken = arrays_->take(call_.tokens * columns);
        switch (place) {
            case Register::x:
                x_ = taken;
                x_columns_ = columns;
                break;
            case Register::kept:
                kept_ = taken;
                kept_columns_ = columns;
                break;
            default:
                (place == Register::other ? other_ : normed_) = taken;
        }
        return taken;
    }

    // Heads in an array of their own, normed; `weight` may be null.
    Heads norm_heads(const Heads& heads, int64_t head_dim, const float* weight, HeadNorm kind, float eps) {
        const int64_t columns = heads.count * head_dim;
        float* const packed = pack(heads, head_dim).x;
        float* const normed = arrays_->take(call_.tokens * columns);
        if (kind == HeadNorm::layer) {
            LayerNormCall norm{packed, nullptr, weight, nullptr, normed, nullptr, head_dim, eps};
            norm.weight_rows = heads.count;
            spread_layer_norm(runtime_, norm, call_.tokens * heads.count);
            return {normed, columns, heads.count};
        }
        const int64_t length = kind == HeadNorm::joint ? columns : head_dim;
        spread_rms_norm(runtime_, {packed, nullptr, weight, normed, nullptr, length, eps},
                        call_.tokens * columns / length);
        return {normed, columns, heads.count};
    }

    Heads pack(const Heads& heads, int64_t head_dim) {
        const int64_t columns = heads.count * head_dim;
        float* const packed = arrays_->take(call_.tokens * columns);
        for (int64_t token = 0; token < call_.tokens; ++token) {
            std::copy_n(heads.x + token * heads.stride, columns, packed + token * columns);
        }
        return {packed, columns, heads.count};
    }

    void rotate(const Layer& layer, const Heads& heads, bool queries) {
        RopeCall turn = call_.ropes[static_cast<size_t>(layer.rope)];
        if (!queries) turn.factors = nullptr;
        if (turn.rot_dim == 0 && turn.factors == nullptr) return;
        turn.x = heads.x;
        turn.head_dim = layer.head_dim;
        turn.token_stride = heads.stride;
        turn.heads = heads.count;
        spread_rope(runtime_, turn, call_.tokens);
    }

    void split_heads(const Layer& layer, const Operator& op) {
        const int64_t dim = layer.head_dim, q_columns = layer.heads * dim, kv_columns = layer.kv_heads * dim;
        const int64_t columns = q_columns + (op.projected - 1) * kv_columns;
        Heads q{x_, columns, layer.heads};
        Heads k{x_ + q_columns, columns, layer.kv_heads}, v{x_ + q_columns + kv_columns, columns, layer.kv_heads};
        const bool norms = op.q_norm != nullptr;
        if (norms) q = norm_heads(q, dim, op.q_norm, op.norms_heads, op.norm.eps);
        rotate(layer, q, true);
        query_ = q;
        if (op.projected == 1) return;
        if (op.projected == 2) v = norms ? k : pack(k, dim);  // what is not normed is rotated in place
        if (norms) {
            k = norm_heads(k, dim, op.k_norm, op.norms_heads, op.norm.eps);
            if (op.norms_values) v = norm_heads(v, dim, nullptr, HeadNorm::each, op.norm.eps);
        }
        rotate(layer, k, false);
        spread_write_pages(runtime_, write_call(layer, k, layer.k_pool, false),
                           write_call(layer, v, layer.v_pool, true));
    }

    WritePagesCall write_call(const Layer& layer, const Heads& heads, void* pool, bool values) const {
        WritePagesCall write = call_.groups[static_cast<size_t>(layer.group)].write;
        write.rows = heads.x;
        write.token_stride = heads.stride;
        write.pool = pool;
        write.values = values;
        return write;
    }

    void attend(const Layer& layer) {
        AttendCall attend = call_.groups[static_cast<size_t>(layer.group)].attend;
        attend.q = query_.x;
        attend.q_stride = query_.stride;
        attend.k_pool = layer.k_pool;
        attend.v_pool = layer.v_pool;
        attend.heads = layer.heads;
        attend.group = layer.heads / layer.kv_heads;
        attend.scale = layer.scale;
        attend.softcap = layer.softcap;
        attend.sinks = layer.sinks;
        attend.window = layer.window;
        attend.out = write(Register::x, layer.heads * layer.head_dim);
        run_attend(runtime_, attend, plan_);
    }

    States states_of(const Layer& layer, const States& own) const {
        return {layer.states,       layer.slot_floats, own.first,      call_.state_reads,
                call_.state_writes, call_.starts,      call_.sequences};
    }

    void convolve(const Layer& layer, const Operator& op) {
        ShortConvCall conv = op.conv;
        conv.x = kept_ + op.kept_first;
        conv.x_stride = kept_columns_;
        conv.out = write(Register::x, conv.channels);
        conv.states = states_of(layer, conv.states);
        spread_short_conv(runtime_, conv);
    }

    void recur(const Layer& layer, const Operator& op) {
        PrepareRecurrenceCall prepare = op.prepare;
        RecurrenceCall recurrence = op.recurrence;
        const float *const source = x_, *const gates = kept_ + op.kept_first;
        const int64_t stride = x_columns_, keys = recurrence.key_heads * recurrence.rows;
        const int64_t values = recurrence.value_heads * recurrence.columns;
        recurrence.states = states_of(layer, recurrence.states);
        recurrence.v_stride = recurrence.k_stride = recurrence.q_stride = prepare.heads_stride = stride;
        prepare.steps = gates;
        prepare.steps_stride = prepare.betas_stride = kept_columns_;
        recurrence.out = write(Register::x, values);
        if (op.kind == Kind::mamba2) {
            recurrence.v = source;
            recurrence.k = source + values;
            recurrence.q = recurrence.k + keys;
            return spread_mamba2(runtime_, prepare, recurrence);
        }
        recurrence.v = source + 2 * keys;
        prepare.heads = source;
        prepare.betas = gates;
        prepare.steps = gates + recurrence.value_heads;
        spread_gated_delta(runtime_, prepare, recurrence);
    }

    void gate_and_norm(const Operator& op) {
        GatedNormCall norm = op.gated_norm;
        norm.x = x_;
        norm.gate = kept_ + op.kept_first;
        norm.gate_stride = kept_columns_;
        norm.out = write(Register::x, norm.columns);
        spread_gated_norm(runtime_, norm, call_.tokens);
    }

    void route(const Operator& op) {
        RouteCall call = op.router;
        used_ = call.used;
        chosen_ = reinterpret_cast<int32_t*>(arrays_->take(call_.tokens * used_));
        shares_ = arrays_->take(call_.tokens * used_);
        call.logits = x_;
        call.chosen = chosen_;
        call.shares = shares_;
        run_route(runtime_, call, call_.tokens);
    }

    void activate(const Operator& op) {
        const int64_t x_columns = (op.gated ? 2 : 1) * op.features;
        const float* const source = x_;
        ActivateCall call{source,      nullptr,      write(Register::x, op.features), op.features, x_columns, 0,
                          op.features, op.activation};
        if (op.gated) {
            call.up = source + op.features;
            call.up_stride = x_columns;
        } else if (op.first >= 0) {
            call.up = inputs_ + op.first;
            call.up_stride = op.columns;
        }
        pending_ = fuse_activate(runtime_, call);
    }

    Runtime& runtime_;
    const LayersCall& call_;
    const Layer* planned_ = nullptr;
    AttendPlan plan_{};
    std::optional<Arrays> arrays_;
    float *normed_ = nullptr, *x_ = nullptr, *other_ = nullptr, *inputs_ = nullptr, *kept_ = nullptr;
    int64_t x_columns_ = 0, kept_columns_ = 0;
    int64_t used_ = 0;  // experts of a token
    int32_t* chosen_ = nullptr;
    float* shares_ = nullptr;
    Heads query_{};
    MakeRows pending_ = nullptr;
    bool has_delta_ = false;  // whether anything is to be added to the stream
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
