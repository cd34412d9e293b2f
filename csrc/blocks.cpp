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

RmsNormCall norm_stream(const StreamCall& stream, const float* weight, float eps, float* normed) {
    return {stream.stream, stream.delta, weight, normed, stream.sum, stream.columns, eps};
}

// Heads of all tokens, out of the columns of a fused product, normed one by one; returns them in an array of their own.
float* norm_heads(Runtime& runtime, const float* from, int64_t stride, int64_t tokens, int64_t heads, int64_t head_dim,
                  const float* weight, float eps, float* packed, float* normed) {
    for (int64_t token = 0; token < tokens; ++token) {
        std::copy_n(from + token * stride, heads * head_dim, packed + token * heads * head_dim);
    }
    spread_rms_norm(runtime, {packed, nullptr, weight, normed, nullptr, head_dim, eps}, tokens * heads);
    return normed;
}

}  // namespace

void run_self_attention(Runtime& runtime, const AttentionBlock& block, AttentionCall call, const StreamCall& stream) {
    const int64_t tokens = stream.tokens, dim = block.head_dim;
    const int64_t q_columns = block.heads * dim, kv_columns = block.kv_heads * dim,
                  columns = q_columns + 2 * kv_columns;
    const bool norms_heads = block.q_norm != nullptr;
    const int64_t packed = norms_heads ? 2 * tokens * (q_columns + kv_columns) : 0;
    Arrays arrays(runtime, tokens * (stream.columns + columns + q_columns) + packed, 7);
    float* const normed = arrays.take(tokens * stream.columns);
    float* const qkv = arrays.take(tokens * columns);
    const OperatorTable& table = *operator_table(runtime.isa);
    const RmsNormCall norm = norm_stream(stream, block.norm, block.eps, normed);
    multiply(runtime, *block.qkv, normed, tokens, qkv,
             [&](int64_t first, int64_t last) { table.rms_norm(norm, first, last); });
    float *q = qkv, *k = qkv + q_columns;
    int64_t q_stride = columns, k_stride = columns;
    if (norms_heads) {
        float* const q_packed = arrays.take(tokens * q_columns);
        float* const q_normed = arrays.take(tokens * q_columns);
        float* const k_packed = arrays.take(tokens * kv_columns);
        float* const k_normed = arrays.take(tokens * kv_columns);
        q = norm_heads(runtime, q, columns, tokens, block.heads, dim, block.q_norm, block.eps, q_packed, q_normed);
        k = norm_heads(runtime, k, columns, tokens, block.kv_heads, dim, block.k_norm, block.eps, k_packed, k_normed);
        q_stride = q_columns;
        k_stride = kv_columns;
    }
    RopeCall turn = call.rope;
    turn.x = q;
    turn.token_stride = q_stride;
    turn.heads = block.heads;
    spread_rope(runtime, turn, tokens);
    turn.x = k;
    turn.token_stride = k_stride;
    turn.heads = block.kv_heads;
    spread_rope(runtime, turn, tokens);
    call.keys.rows = k;
    call.keys.token_stride = k_stride;
    call.values.rows = qkv + q_columns + kv_columns;
    call.values.token_stride = columns;
    spread_write_pages(runtime, call.keys, call.values);
    call.attend.q = q;
    call.attend.q_stride = q_stride;
    call.attend.out = arrays.take(tokens * q_columns);
    run_attend(runtime, call.attend, call.sequences);
    multiply(runtime, *block.output, call.attend.out, tokens, stream.out);
}

void run_feed_forward(Runtime& runtime, const FeedForwardBlock& block, const StreamCall& stream) {
    const int64_t tokens = stream.tokens, columns = block.down->in_features();
    const bool gated = can_multiply_gated(*block.gate_up, *block.down, tokens);
    Arrays arrays(runtime, tokens * (stream.columns + (gated ? 0 : 3 * columns)), 3);
    float* const normed = arrays.take(tokens * stream.columns);
    const OperatorTable& table = *operator_table(runtime.isa);
    const RmsNormCall norm = norm_stream(stream, block.norm, block.eps, normed);
    const auto make_normed = [&](int64_t first, int64_t last) { table.rms_norm(norm, first, last); };
    if (gated) {
        return multiply_gated(runtime, *block.gate_up, normed, tokens, block.kind, *block.down, stream.out,
                              make_normed);
    }
    float* const gate_up = arrays.take(tokens * 2 * columns);
    float* const activated = arrays.take(tokens * columns);
    multiply(runtime, *block.gate_up, normed, tokens, gate_up, make_normed);
    const ActivateCall call{gate_up, activated, columns, block.kind};
    multiply(runtime, *block.down, activated, tokens, stream.out,
             [&](int64_t first, int64_t last) { table.activate(call, first, last, 0, columns); });
}

}  // namespace mlxr
