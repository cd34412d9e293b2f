// The two blocks of a transformer layer, each one call: self-attention (norm, Q K V, rotation, pages, attention,
// output) and feed-forward (norm, gate and up, activation, down). They are the operators in their order, with the same
// bits; what one call saves are the ways to Python between them, and the waiting: with few tokens, what must be done
// before a product starts is done by the calling thread while the others already ask memory for their weights. Knows no
// Python.
#pragma once

#include "linear/linear.h"
#include "operator_table.h"
#include "runtime.h"

namespace mlxr {

// The residual stream (tokens, columns): `sum` becomes stream + delta (null: stream, which is then not written), `out`
// what the block adds to it.
struct StreamCall {
    const float* stream;
    const float* delta;
    float* sum;
    float* out;
    int64_t tokens, columns;
};

struct AttentionBlock {
    const float* norm;  // (columns)
    float eps;
    const LinearWeight* qkv;
    const float *q_norm, *k_norm;  // (head_dim), or null
    const LinearWeight* output;
    int64_t heads, kv_heads, head_dim;
};

struct FeedForwardBlock {
    const float* norm;
    float eps;
    const LinearWeight* gate_up;
    const LinearWeight* down;
    Activation kind;
};

// What a batch and the cache give to self-attention. `attend` is complete but for q, q_stride and out; `rope` and the
// two of write_pages but for the numbers and their token stride.
struct AttentionCall {
    RopeCall rope;
    WritePagesCall keys, values;
    AttendCall attend;
    int64_t sequences;
};

// All sizes must be checked; the caller holds runtime.mutex. Throw std::bad_alloc when scratch cannot grow.
void run_self_attention(Runtime& runtime, const AttentionBlock& block, AttentionCall call, const StreamCall& stream);
void run_feed_forward(Runtime& runtime, const FeedForwardBlock& block, const StreamCall& stream);

}  // namespace mlxr
