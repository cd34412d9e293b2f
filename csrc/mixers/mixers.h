// What recurrent mixers take: short convolutions, the gated delta rule, Mamba-2, and the norm with a gate after them.
// Strides and sizes count floats. Pointers are checked by the caller.
//
// Token t of a sequence is computed from the state before it, by the same steps in the same order whether its tokens
// come together or one by one; and each channel, or column of values, by itself. So no cut of a sequence and no share
// of the work on a thread changes a bit.
#pragma once

#include <stdint.h>

namespace mlxr {

// Where the states of a batch's sequences lie. Nobody writes a slot that is read.
struct States {
    float* pool;  // (slots, slot_floats); an operator's own part of a slot begins at `first`
    int64_t slot_floats, first;
    const int32_t* reads;   // (sequences): slots, -1 for a state of zeros
    const int32_t* writes;  // (sequences): slots
    const int32_t* starts;  // (sequences + 1): the tokens of each sequence
    int64_t sequences;
};

// What surrounds a convolution: nothing, silu of its result, or gates: of rows B | C | x the input is B x, and the
// result is multiplied by C.
enum class ConvKind : int { plain, silu, gated };

// A causal convolution of each channel over the last `taps` inputs; of a sequence the last taps - 1 are its state, as
// rows of channels.
struct ShortConvCall {
    const float* x;  // (tokens, channels, or three times as many) in rows of x_stride
    int64_t x_stride;
    const float* weight;  // (taps, channels)
    const float* bias;    // (channels) or null
    float* out;           // (tokens, channels)
    int64_t channels, taps;
    ConvKind kind;
    States states;
};

// Makes of the inputs of a recurrence what it runs on.
struct PrepareRecurrenceCall {
    const float* heads;  // (tokens, 2, key_heads, rows) in rows of heads_stride: q, then k; null to leave them
    int64_t heads_stride, key_heads, rows;
    float scale, eps;    // q and k are divided by the root of the sum of their squares + eps, q then multiplied
    const float* steps;  // (tokens, decays) in rows of steps_stride
    const float* betas;  // (tokens, value_heads) in rows of betas_stride, or null: then they are the steps
    int64_t steps_stride, betas_stride, value_heads, decays;
    const float *rates, *bias;  // (decays): the decay is e**(rate * softplus(step + bias))
    float* normed;              // as heads, packed
    float* decay;               // (tokens, decays)
    float* factors;             // (tokens, value_heads): sigmoid of betas, or softplus(step + bias)
};

// S = S * decay + k (x) w for each value head, out = S^T q + skip v; w = (v - S^T k) * factor with the delta rule,
// after S has decayed, else v * factor. S is the sequence's state, (value_heads, rows, columns).
struct RecurrenceCall {
    const float *q, *k, *v;  // (tokens, key_heads, rows) twice, (tokens, value_heads, columns)
    int64_t q_stride, k_stride, v_stride;
    const float *decay, *factors;  // (tokens, value_heads, decay_rows), (tokens, value_heads)
    const float* skip;             // (value_heads) or null
    float* out;                    // (tokens, value_heads, columns)
    int64_t key_heads, value_heads, rows, columns;
    int64_t decay_rows;  // 1, or rows: a decay for each
    bool tiled;          // value head h reads key head h % key_heads, else h / (value_heads / key_heads)
    bool delta;
    States states;
};
// Columns that are computed together; a task is one such part of one head of one sequence.
constexpr int64_t kRecurrenceColumns = 32;
static inline int64_t recurrence_parts(const RecurrenceCall& call) {
    return (call.columns + kRecurrenceColumns - 1) / kRecurrenceColumns;
}

// Groups of `width` columns, each normed by its root mean square, and times the silu of a gate: before the norm or
// after. Without a weight there is no norm, but the gate alone.
struct GatedNormCall {
    const float* x;  // (rows, columns)
    const float* gate;
    int64_t gate_stride;
    const float* weight;  // (weight_columns): width, the same for all groups, or columns; or null
    float* out;           // (rows, columns)
    int64_t columns, width, weight_columns;
    float eps;
    bool gate_first;
};

}  // namespace mlxr
