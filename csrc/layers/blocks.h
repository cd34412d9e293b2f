// Transformer layers as one call: the operators of each layer in the order in which they were appended, with the bits
// that they have one by one. What one call saves are the ways to Python between them, and the waiting: with few tokens,
// what must be done before a product starts is done by the calling thread while the others already ask memory for its
// weights. Knows no Python.
#pragma once

#include <vector>

#include "embed/ngrams.h"
#include "layers/hadamard.h"
#include "linear/linear.h"
#include "lora/adapter.h"
#include "mixers/mixers.h"
#include "moe/experts.h"
#include "operators/operator_table.h"
#include "quants/quants.h"
#include "runtime/runtime.h"

namespace mlxr {

// Where operators read and write: (tokens, columns) of the residual stream; what is still to be added to it; what
// blocks begin with; what is passed on within a block; what a block beside another one adds; what all layers get of
// each token besides the stream, the columns of one layer after those of another; what a block keeps for its later
// operators; what it begins with in the basis of rotated weights; the residual streams of a model that has several side
// by side; by how much each of these takes what a block gives; and the steps by which states of channels forget.
enum class Register : uint8_t { stream, delta, normed, x, other, inputs, kept, turned, streams, gains, steps };
constexpr int kRegisters = 11;

struct Norm {
    const float* weight;
    const float* bias;  // of layer norms, or null
    float eps;
    bool is_layer_norm;
};

// What an operator does, and the fields that it has besides `source` and `target`.
enum class Kind : uint8_t {
    norm,                   // norm, columns, cuts; from the stream, to which the delta is added first
    sum,                    // factor: the stream becomes (stream + delta) * factor, and nothing is left to add
    product,                // weight
    rope_and_write_kv,      // q_norm, k_norm (or null), norms_heads, norms_values, projected
    rope_and_write_latent,  // norm, of the latent vectors in what was kept; x has queries
    attend,
    project_parts,  // parts, passed: see PartsProduct
    activate,       // activation, parameters, features, gated; or first, where the inputs multiply
    scale,          // factor, softcap, columns
    cut_gates,      // factor, features: of x, which has so many columns first
    join,           // factor, columns: the target becomes (target + other) * factor
    rows,           // table, columns
    hadamard,       // hadamard
    // These read x, of which they make another one, and what was kept, of which `kept_first` is a column.
    gate_heads,   // kept_columns, softplus
    gated_norm,   // gated_norm
    short_conv,   // conv; reads only what was kept
    gated_delta,  // prepare, recurrence
    mamba2,       // the same
    scan,         // scan; besides x it reads the steps, and `other` has b and c
    route,        // router: the experts of each token and their shares, by the logits in x
    mix,          // experts: a token goes to those that were chosen for it
    gate_rows,    // columns: a token is multiplied by the sigmoid of the one number in x
    take_shares,  // columns: a token is multiplied by the share of its one expert, which is 1 then
    // These have `cuts` streams of `columns` numbers.
    mix_streams,      // what was kept becomes their mean, by the gates in x
    spread_streams,   // factor, gate_scale, has_gains, adds
    match_streams,    // gate_scale: how alike x and what was kept are becomes the gains
    balance_streams,  // balance: what is in x becomes the gains
    blend_streams,    // has_gains, adds
    level_streams,    // the streams that follow are those in x, as long as the stream, which is the first of them
    ngrams,           // table, ngrams: the rows of a table that tokens name by themselves and those before them
};

// How the heads of queries and keys are normed.
enum class HeadNorm : uint8_t {
    each,    // by itself, by one weight for all
    joint,   // all heads of a token as one row
    layer,   // by itself, less its mean, by a weight of its own
    turned,  // as each, after the rotation
};

// A table whose rows tokens name by their ids.
struct Table {
    Type type;
    const uint8_t* data;
    int64_t rows;
};

struct Operator {
    Kind kind;
    Register source, target;
    Norm norm;
    const LinearWeight* weight;
    std::vector<const LinearWeight*> parts;
    int64_t passed;
    const float *q_norm, *k_norm;
    HeadNorm norms_heads;
    bool norms_values;
    int64_t projected;  // 3: queries, keys and values; 2: the values are the keys; 1: queries alone
    Activation activation;
    ActivationParameters parameters;
    int64_t features;
    bool gated;
    int64_t first;  // of the inputs' columns, or -1
    float factor, softcap;
    float gate_scale;  // of gates of streams
    bool has_gains, adds;
    NgramCall ngrams;            // but for the arrays of the batch
    BalanceStreamsCall balance;  // the same
    int64_t columns;             // of each token
    int64_t cuts;                // into which these are cut to be normed, or streams
    int64_t weight_rows;         // of a norm: how many of the cuts have weights of their own
    Table table;
    HadamardCall hadamard;  // but for the arrays of the batch
    int64_t kept_first, kept_columns;
    bool softplus;
    // Complete but for arrays of the batch. States begin at `first` of a layer's own.
    GatedNormCall gated_norm;
    ShortConvCall conv;
    PrepareRecurrenceCall prepare;
    RecurrenceCall recurrence;
    ScanCall scan;
    RouteCall router;  // but for logits and results
    const Experts* experts;
};

// One layer, with its pools and where the tokens of a batch stand in them: layers of one group share slots and table.
// Without attention it has no heads and no pools of pages, without a recurrent mixer no states.
struct Layer {
    std::vector<Operator> operators;
    int64_t heads, kv_heads, head_dim;
    int64_t value_dim;    // of values that are the last numbers of their keys, 0 where values have pools of their own
    int64_t window;       // positions seen
    bool symmetric;       // before and after the own one
    bool chunked;         // of the own chunk of as many positions
    bool whole_pictures;  // tokens of a picture see all of it, as `ends` say
    float scale, softcap;
    const float* sinks;   // (heads), or null
    const float* biases;  // (heads, 2 bias_span + 1), or null
    int64_t bias_span;
    int64_t rope, group;
    void *k_pool, *v_pool;
    float* states;  // (slots, slot_floats)
    int64_t slot_floats;
};

// A batch as the layers of one group see it. `write` is complete but for rows and pool, `attend` but for q, out, pools,
// heads, scores and window.
struct GroupCall {
    WritePagesCall write;
    AttendCall attend;
};

// A batch for all layers. `ropes` are complete but for the numbers and heads.
struct LayersCall {
    float* stream;  // (tokens, columns), the residual stream; what all blocks but the last add is added to it
    float* delta;   // (tokens, columns): what the last block adds
    int64_t tokens, columns, sequences;
    const int32_t* token_ids;
    std::vector<RopeCall> ropes;
    std::vector<GroupCall> groups;
    // (sequences): slots of states, see States; (sequences + 1): the tokens of each sequence.
    const int32_t *state_reads, *state_writes, *starts;
    const int32_t* ends;  // (tokens): of what each token sees in layers with whole pictures; null for its own position
    std::vector<AdapterRows> adapters;
};

// What makes logits of the last layer's states.
struct Head {
    Norm norm;
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
