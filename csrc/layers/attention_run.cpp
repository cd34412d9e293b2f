// See attention_run.h.
#include "layers/attention_run.h"

#include <algorithm>

#include "layers/spread.h"

namespace mlxr {

void AttentionRun::plan(const Layer& layer) {
    if (layer.heads == 0) return;
    const bool is_planned = planned_ != nullptr && planned_->window == layer.window &&
                            planned_->symmetric == layer.symmetric && planned_->chunked == layer.chunked &&
                            planned_->whole_pictures == layer.whole_pictures && planned_->group == layer.group &&
                            planned_->heads == layer.heads;
    planned_ = &layer;
    if (!is_planned) plan_ = plan_attend(runtime_, attend_call(layer), call_.sequences);
}

// What the cut for the threads depends on.
AttendCall AttentionRun::attend_call(const Layer& layer) const {
    AttendCall attend = call_.groups[static_cast<size_t>(layer.group)].attend;
    attend.heads = layer.heads;
    attend.group = layer.heads / layer.kv_heads;
    attend.window = layer.window;
    attend.symmetric = layer.symmetric;
    attend.chunked = layer.chunked;
    attend.ends = layer.whole_pictures ? call_.ends : nullptr;
    return attend;
}

// Heads in an array of their own, normed; `weight` may be null.
AttentionRun::Heads AttentionRun::norm_heads(const Heads& heads, int64_t head_dim, const float* weight, HeadNorm kind,
                                             float eps) {
    const int64_t columns = heads.count * head_dim;
    float* const packed = pack(heads, head_dim).x;
    float* const normed = registers_.take(columns);
    if (kind == HeadNorm::layer) {
        LayerNormCall norm{packed, nullptr, weight, nullptr, normed, nullptr, head_dim, eps};
        norm.weight_rows = heads.count;
        spread_layer_norm(runtime_, norm, call_.tokens * heads.count);
        return {normed, columns, heads.count};
    }
    const int64_t length = kind == HeadNorm::joint ? columns : head_dim;
    spread_rms_norm(runtime_, {packed, nullptr, weight, normed, nullptr, length, eps}, call_.tokens * columns / length);
    return {normed, columns, heads.count};
}

AttentionRun::Heads AttentionRun::pack(const Heads& heads, int64_t head_dim) {
    const int64_t columns = heads.count * head_dim;
    float* const packed = registers_.take(columns);
    for (int64_t token = 0; token < call_.tokens; ++token) {
        std::copy_n(heads.x + token * heads.stride, columns, packed + token * columns);
    }
    return {packed, columns, heads.count};
}

void AttentionRun::rotate(const Layer& layer, const Heads& heads, bool queries) {
    RopeCall turn = call_.ropes[static_cast<size_t>(layer.rope)];
    if (!queries) turn.factors = nullptr;
    if (turn.rot_dim == 0 && turn.factors == nullptr) return;
    turn.x = heads.x;
    turn.head_dim = layer.head_dim;
    turn.token_stride = heads.stride;
    turn.heads = heads.count;
    spread_rope(runtime_, turn, call_.tokens);
}

void AttentionRun::rope_and_write_kv(const Layer& layer, const Operator& op) {
    const int64_t dim = layer.head_dim, q_columns = layer.heads * dim, kv_columns = layer.kv_heads * dim;
    const int64_t columns = q_columns + (op.projected - 1) * kv_columns;
    float* const x = registers_.find(Register::x);
    Heads q{x, columns, layer.heads};
    Heads k{x + q_columns, columns, layer.kv_heads}, v{x + q_columns + kv_columns, columns, layer.kv_heads};
    const bool turned = op.norms_heads == HeadNorm::turned, after = turned && op.q_norm != nullptr;
    const bool before = !turned && op.q_norm != nullptr;
    if (before) q = norm_heads(q, dim, op.q_norm, op.norms_heads, op.norm.eps);
    rotate(layer, q, true);
    if (after) q = norm_heads(q, dim, op.q_norm, op.norms_heads, op.norm.eps);
    query_ = q;
    if (op.projected == 1) return;
    // What is not normed before is rotated in place.
    if (op.projected == 2) v = before || op.norms_values ? k : pack(k, dim);
    if (before) k = norm_heads(k, dim, op.k_norm, op.norms_heads, op.norm.eps);
    if (op.q_norm != nullptr && op.norms_values) v = norm_heads(v, dim, nullptr, HeadNorm::each, op.norm.eps);
    rotate(layer, k, false);
    if (after) k = norm_heads(k, dim, op.k_norm, op.norms_heads, op.norm.eps);
    const WritePagesCall values = write_call(layer, v, layer.v_pool, true);
    spread_write_pages(runtime_, write_call(layer, k, layer.k_pool, false), &values);
}

// What was kept has of each token the latent vector, then the numbers that rotate, which stand first in its key.
void AttentionRun::rope_and_write_latent(const Layer& layer, const Operator& op) {
    const int64_t dim = layer.head_dim, value_dim = layer.value_dim, turned = dim - value_dim, tokens = call_.tokens;
    const float* const kept = registers_.find(Register::kept);
    float *const latent = registers_.take(value_dim), *const normed = registers_.take(value_dim);
    const Heads k{registers_.take(dim), dim, 1};
    for (int64_t token = 0; token < tokens; ++token) {
        std::copy_n(kept + token * dim, value_dim, latent + token * value_dim);
    }
    spread_rms_norm(runtime_, {latent, nullptr, op.norm.weight, normed, nullptr, value_dim, op.norm.eps}, tokens);
    for (int64_t token = 0; token < tokens; ++token) {
        std::copy_n(kept + token * dim + value_dim, turned, k.x + token * dim);
        std::copy_n(normed + token * value_dim, value_dim, k.x + token * dim + turned);
    }
    rotate(layer, k, false);
    query_ = {registers_.find(Register::x), layer.heads * dim, layer.heads};
    rotate(layer, query_, true);
    spread_write_pages(runtime_, write_call(layer, k, layer.k_pool, false), nullptr);
}

WritePagesCall AttentionRun::write_call(const Layer& layer, const Heads& heads, void* pool, bool values) const {
    WritePagesCall write = call_.groups[static_cast<size_t>(layer.group)].write;
    write.rows = heads.x;
    write.token_stride = heads.stride;
    write.pool = pool;
    write.values = values;
    return write;
}

void AttentionRun::attend(const Layer& layer) {
    AttendCall attend = attend_call(layer);
    attend.q = query_.x;
    attend.q_stride = query_.stride;
    attend.k_pool = layer.k_pool;
    attend.v_pool = layer.v_pool;
    attend.scale = layer.scale;
    attend.softcap = layer.softcap;
    attend.sinks = layer.sinks;
    attend.biases = layer.biases;
    attend.bias_span = layer.bias_span;
    attend.out = registers_.write(Register::x, layer.heads * attend.value_dim);
    run_attend(runtime_, attend, plan_);
}

}  // namespace mlxr
