// What recurrent mixers take: short convolutions, the gated delta rule, Mamba-2, Mamba, and the norm with a gate after
// them.
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
    // (decays): the decay is e**(rate * softplus(step + bias)), or with a bound below 0 e**(bound * sigmoid(-rate *
    // (step + bias)))
    const float *rates, *bias;
    float bound;
    float* decay;    // (tokens, decays)
    float* factors;  // (tokens, value_heads): sigmoid of betas, or softplus(step + bias)
};

// S = S * decay + k (x) w for each value head, out = S^T q + skip v; w = (v - S^T k) * factor with the delta rule,
// after S has decayed, else v * factor. S is the sequence's state: (value_heads, rows, columns), and where all rows of
// a head have one decay then (value_heads), a scale that the numbers of a head are multiplied by; 0 says 1.
struct RecurrenceCall {
    const float *q, *k;  // (tokens, key_heads, rows); null where they are normed first
    const float* v;      // (tokens, value_heads, columns)
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
// What a task computes: one part of the columns of one head of one sequence.
struct RecurrenceTask {
    int64_t sequence, key_head, head, part;
};
// The queries and keys that a task reads: (tokens of the sequence, rows) in rows of their strides.
struct KeyRows {
    const float *q, *k;
    int64_t q_stride, k_stride;
};
// Columns that are computed together.
constexpr int64_t kRecurrenceColumns = 32;
static inline int64_t recurrence_state_floats(const RecurrenceCall& call) {
    return call.value_heads * (call.rows * call.columns + (call.decay_rows == 1 ? 1 : 0));
}
static inline int64_t recurrence_parts(const RecurrenceCall& call) {
    return (call.columns + kRecurrenceColumns - 1) / kRecurrenceColumns;
}
// Tasks of one sequence and key head follow each other.
static inline RecurrenceTask find_recurrence_task(const RecurrenceCall& call, int64_t index) {
    const int64_t parts = recurrence_parts(call), sharing = call.value_heads / call.key_heads;
    const int64_t keys = index / (parts * sharing), one = index / parts % sharing, key_head = keys % call.key_heads;
    const int64_t head = call.tiled ? one * call.key_heads + key_head : key_head * sharing + one;
    return {keys / call.key_heads, key_head, head, index % parts};
}

// Mamba: each channel has a state of `rows` numbers S, which forget at a rate each. With d = softplus(step)
// S = S * e**(rate * d) + b (u * d), out = c S + skip * u; channels share b and c. S is the sequence's state: (rows,
// channels).
struct ScanCall {
    const float *u, *steps;  // (tokens, channels)
    const float *b, *c;      // (tokens, rows) in rows of bc_stride
    int64_t bc_stride;
    const float* rates;  // (rows, channels)
    const float* skip;   // (channels)
    float* out;          // (tokens, channels)
    int64_t rows, channels;
    States states;
};
// Parts of a sequence's channels, which tasks compute.
static inline int64_t scan_parts(const ScanCall& call) {
    return (call.channels + kRecurrenceColumns - 1) / kRecurrenceColumns;
}
// Floats of memory that a task works in: a state's numbers, and their rates.
static inline int64_t scan_scratch_floats(const ScanCall& call) {
    return 2 * call.rows * kRecurrenceColumns;
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
