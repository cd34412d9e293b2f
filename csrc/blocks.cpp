// See blocks.h.
#include "blocks.h"

#include <algorithm>

#include "attend.h"
#include "spread.h"

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

// A block's input: the stream, to which what the block before adds is added first, and normed.
// `is_first`: nothing is to be added.
RmsNormCall norm_stream(const LayersCall& call, bool is_first, const float* norm, float eps, float* normed) {
    return {call.stream, is_first ? nullptr : call.delta, norm, normed, call.stream, call.columns, eps};
}

MakeRows make_normed(Runtime& runtime, const RmsNormCall& step) {
    const OperatorTable& table = *operator_table(runtime.isa);
    return [&table, &step](int64_t first, int64_t last) { table.rms_norm(step, first, last); };
}

// Heads of all tokens, some columns of a fused product.
struct Heads {
    float* x;
    int64_t stride, count;
};

// Each head normed, in an array of its own.
Heads norm_heads(Runtime& runtime, const Heads& heads, int64_t tokens, int64_t head_dim, const float* weight, float eps,
                 Arrays& arrays) {
    const int64_t columns = heads.count * head_dim;
    float* const packed = arrays.take(tokens * columns);
    float* const normed = arrays.take(tokens * columns);
    for (int64_t token = 0; token < tokens; ++token) {
        std::copy_n(heads.x + token * heads.stride, columns, packed + token * columns);
    }
    spread_rms_norm(runtime, {packed, nullptr, weight, normed, nullptr, head_dim, eps}, tokens * heads.count);
    return {normed, columns, heads.count};
}

void rotate(Runtime& runtime, const LayersCall& call, const Heads& heads) {
    RopeCall turn = call.rope;
    turn.x = heads.x;
    turn.token_stride = heads.stride;
    turn.heads = heads.count;
    spread_rope(runtime, turn, call.tokens);
}

WritePagesCall write_call(const LayersCall& call, const Heads& heads, const int32_t* slots, void* pool, bool values) {
    WritePagesCall write = call.write;
    write.slots = slots;
    write.rows = heads.x;
    write.token_stride = heads.stride;
    write.pool = pool;
    write.values = values;
    return write;
}

void run_self_attention(Runtime& runtime, const Layer& layer, const LayersCall& call, bool is_first,
                        const AttendPlan& plan) {
    const AttentionBlock& block = layer.attention;
    const int64_t tokens = call.tokens, dim = block.head_dim;
    const int64_t q_columns = block.heads * dim, kv_columns = block.kv_heads * dim,
                  columns = q_columns + 2 * kv_columns;
    const bool norms_heads = block.q_norm != nullptr;
    Arrays arrays(runtime, tokens * (call.columns + columns + q_columns + norms_heads * 2 * (q_columns + kv_columns)),
                  7);
    float* const normed = arrays.take(tokens * call.columns);
    float* const qkv = arrays.take(tokens * columns);
    const RmsNormCall step = norm_stream(call, is_first, block.norm, block.eps, normed);
    multiply(runtime, *block.qkv, normed, tokens, qkv, make_normed(runtime, step));
    Heads q{qkv, columns, block.heads}, k{qkv + q_columns, columns, block.kv_heads};
    const Heads v{qkv + q_columns + kv_columns, columns, block.kv_heads};
    if (norms_heads) {
        q = norm_heads(runtime, q, tokens, dim, block.q_norm, block.eps, arrays);
        k = norm_heads(runtime, k, tokens, dim, block.k_norm, block.eps, arrays);
    }
    rotate(runtime, call, q);
    rotate(runtime, call, k);
    spread_write_pages(runtime, write_call(call, k, layer.slots, layer.k_pool, false),
                       write_call(call, v, layer.slots, layer.v_pool, true));
    AttendCall attend = call.attend;
    attend.q = q.x;
    attend.q_stride = q.stride;
    attend.k_pool = layer.k_pool;
    attend.v_pool = layer.v_pool;
    attend.scale = layer.scale;
    attend.page_table = layer.page_table;
    attend.table_stride = layer.table_stride;
    attend.window = layer.window;
    attend.out = arrays.take(tokens * q_columns);
    run_attend(runtime, attend, plan);
    multiply(runtime, *block.output, attend.out, tokens, call.delta);
}

void run_feed_forward(Runtime& runtime, const FeedForwardBlock& block, const LayersCall& call) {
    const int64_t tokens = call.tokens, columns = block.down->in_features();
    const bool gated = can_multiply_gated(*block.gate_up, *block.down, tokens);
    Arrays arrays(runtime, tokens * (call.columns + (gated ? 0 : 3 * columns)), 3);
    float* const normed = arrays.take(tokens * call.columns);
    const RmsNormCall step = norm_stream(call, false, block.norm, block.eps, normed);
    if (gated) {
        return multiply_gated(runtime, *block.gate_up, normed, tokens, block.kind, *block.down, call.delta,
                              make_normed(runtime, step));
    }
    float* const gate_up = arrays.take(tokens * 2 * columns);
    float* const activated = arrays.take(tokens * columns);
    multiply(runtime, *block.gate_up, normed, tokens, gate_up, make_normed(runtime, step));
    const ActivateCall activate{gate_up, activated, columns, columns, block.kind};
    const OperatorTable& table = *operator_table(runtime.isa);
    multiply(runtime, *block.down, activated, tokens, call.delta,
             [&](int64_t first, int64_t last) { table.activate(activate, first, last, 0, columns); });
}

}  // namespace

void run_layers(Runtime& runtime, const Layer* layers, int64_t count, const LayersCall& call) {
    AttendPlan plan{};
    for (int64_t i = 0; i < count; ++i) {
        if (i == 0 || layers[i].window != layers[i - 1].window) {
            AttendCall attend = call.attend;
            attend.window = layers[i].window;
            plan = plan_attend(runtime, attend, call.sequences);
        }
        run_self_attention(runtime, layers[i], call, i == 0, plan);
        run_feed_forward(runtime, layers[i].feed_forward, call);
    }
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
        const AttentionBlock& attention = model.layers[i].attention;
        const FeedForwardBlock& feed_forward = model.layers[i].feed_forward;
        for (const LinearWeight* weight : {attention.qkv, attention.output, feed_forward.gate_up, feed_forward.down}) {
            for (const LinearWeight::Part& part : weight->parts()) {
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
    run_layers(runtime, model.layers, model.count, call);
    float* const normed = Arrays(runtime, call.tokens * call.columns, 1).take(call.tokens * call.columns);
    const RmsNormCall step = norm_stream(call, false, model.head.norm, model.head.eps, normed);
    if (call.tokens <= kFewTokens) runtime.pool.fetch_after_next(first_weights(model));
    multiply(runtime, *model.head.output, normed, call.tokens, logits, make_normed(runtime, step));
}

}  // namespace mlxr
