// Transformer layers as one call. Each is self-attention (norm, Q K V, rotation, pages, attention, output) and
// feed-forward (norm, gate and up, activation, down). They are the operators in their order, with the same bits; what
// one call saves are the ways to Python between them, and the waiting: with few tokens, what must be done before a
// product starts is done by the calling thread while the others already ask memory for its weights. Knows no Python.
#pragma once

#include "linear/linear.h"
#include "operator_table.h"
#include "runtime.h"

namespace mlxr {

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

// One layer, with its pools and where the tokens of a batch stand in them: layers of one group share slots and table.
struct Layer {
    AttentionBlock attention;
    FeedForwardBlock feed_forward;
    int64_t window;  // positions seen
    float scale;
    int64_t group;
    void *k_pool, *v_pool;
    const int32_t* slots;
    const int32_t* page_table;
    int64_t table_stride;
};

// A batch for all layers. `rope` is complete but for the numbers and heads, `write` but for the numbers, the pool and
// the slots, `attend` but for q, out, pools, table, scale and window.
struct LayersCall {
    float* stream;  // (tokens, columns), the residual stream; what all blocks but the last add is added to it
    float* delta;   // (tokens, columns): what the last block adds
    int64_t tokens, columns, sequences;
    RopeCall rope;
    WritePagesCall write;
    AttendCall attend;
};

// What makes logits of the last layer's states.
struct Head {
    const float* norm;
    float eps;
    const LinearWeight* output;
};

struct Model {
    const Layer* layers;
    int64_t count;
    Head head;
};

// All sizes must be checked; the caller holds runtime.mutex. Throws std::bad_alloc when scratch cannot grow.
void run_layers(Runtime& runtime, const Layer* layers, int64_t count, const LayersCall& call);

// All layers, then logits (tokens, features of the output) of all tokens. The same holds. After few tokens the pool's
// other threads read the first weights into the cache while the caller prepares the next step.
void run_model(Runtime& runtime, const Model& model, const LayersCall& call, float* logits);

}  // namespace mlxr
