// The table of operators that each tier exports (all but linear and embed, which have kernel_table.h), and
// the plain structures their arguments travel in. Pointers are checked by the caller; nothing here allocates
// or fails.
//
// Every function does a range of rows, heads or tasks, so that the caller can spread ranges over threads; a
// result never depends on how the ranges were cut.
#pragma once

#include <stdint.h>

#include "mixers/mixers.h"
#include "runtime/cpu_features.h"

namespace mlxr {

// Strides and sizes count elements, not bytes.

struct RmsNormCall {
    const float* x;         // (rows, columns)
    const float* residual;  // the same, or null
    const float* weight;    // (weight_rows, columns): row i is multiplied by row i % weight_rows; or null for ones
    float* normed;          // (rows, columns)
    float* summed;          // (rows, columns) when residual is given, else unused
    int64_t columns;
    float eps;
    float residual_scale = 1.0f, sum_scale = 1.0f;  // summed = (x + residual_scale * residual) * sum_scale
    int64_t weight_rows = 1;
};

// The same of the differences from each row's mean, with a bias.
struct LayerNormCall {
    const float* x;         // (rows, columns)
    const float* residual;  // the same, or null
    const float* weight;    // (weight_rows, columns), as above
    const float* bias;      // (columns), or null
    float* normed;          // (rows, columns)
    float* summed;          // (rows, columns) when residual is given, else unused
    int64_t columns;
    float eps;
    float residual_scale = 1.0f, sum_scale = 1.0f;  // summed = (x + residual_scale * residual) * sum_scale
    int64_t weight_rows = 1;
};

struct RopeCall {
    float* x;  // (tokens, heads, head_dim), rotated in place
    int64_t token_stride;
    int64_t heads, head_dim;
    const int32_t* positions;  // (tokens)
    const float* cosines;      // (positions, rot_dim / 2)
    const float* sines;
    int64_t rot_dim;       // even, at most head_dim and kMaxRotDim
    bool interleaved;      // pairs are (2i, 2i + 1), else (i, i + rot_dim / 2)
    const float* factors;  // (positions): what all numbers of a token are then multiplied by; or null
};
constexpr int64_t kMaxRotDim = 1024;

enum class Activation : int {
#define ACTIVATION(name, parameters) name,
#include "tables/activations.def"
};
// How many numbers a layer states of each activation, and those of one.
constexpr int kParameterCounts[] = {
#define ACTIVATION(name, parameters) parameters,
#include "tables/activations.def"
};
constexpr int kMostParameters = 4;
struct ActivationParameters {
    float numbers[kMostParameters] = {};
};
static inline int count_parameters(Activation kind) {
    return kParameterCounts[static_cast<int>(kind)];
}

// Arrays are (rows, columns), each in rows of its own stride.
struct ActivateCall {
    const float* x;
    const float* up;  // what multiplies the activated x; or null, which clamped_swiglu never has
    float* out;
    int64_t columns, x_stride, up_stride, out_stride;
    Activation kind;
    ActivationParameters parameters{};
};

struct ScaleCall {
    const float* x;
    float* out;  // may be x
    float factor;
    float softcap;  // c: what is scaled becomes c tanh(it / c); 0 for none
};

// out = (x + other) * factor, each step rounded.
struct AddCall {
    const float *x, *other;
    float* out;  // may be x or other
    float factor;
};

struct GateHeadsCall {
    const float* x;      // (rows, columns)
    const float* gates;  // (rows, gate_count): each is that of columns / gate_count neighbours
    float* out;          // as x, and may be x
    int64_t columns, gate_count;
    bool softplus;  // of the gate in place of its sigmoid
};

// Of rows of `streams` parts the mean of the parts, each of whose numbers is times the sigmoid of its gate.
struct MixStreamsCall {
    const float *x, *gates;  // (rows, streams, columns)
    float* out;              // (rows, columns)
    int64_t streams, columns;
};

// Each part of a row becomes base + x * factor, times the sigmoid of the part's gate * gate_scale where there is one.
struct SpreadStreamsCall {
    const float* x;      // (rows, columns)
    const float* gates;  // (rows, streams), or null
    const float* base;   // (rows, streams, columns), or null for zeros
    float* out;          // (rows, streams, columns), and may be base
    int64_t streams, columns;
    float factor, gate_scale;
};

// Of each part of a row how alike keys and queries are, p, their product times `scale`: sign(p) sqrt(max(|p|, least)).
struct MatchStreamsCall {
    const float *keys, *queries;  // (rows, streams, columns)
    float* out;                   // (rows, streams)
    int64_t streams, columns;
    float scale, least;
};

// The gains of streams whose mixing is doubly stochastic (arXiv:2512.24880). A row is x * scale + base, where `scale`
// has a number for each of three parts. Of `streams` numbers each the sigmoid + eps says how much of a stream a block
// reads, and twice the sigmoid how much of the block's result a stream takes. Of streams * streams numbers row s says
// how much of stream s each one goes on with: the softmax of each row + eps, then `turns` times divided by sums + eps,
// those of columns, between which come those of rows.
struct BalanceStreamsCall {
    const float* x;             // (rows, columns * streams)
    const float *scale, *base;  // (3), (columns * streams)
    float* out;                 // (rows, columns * streams), and may not be x
    int64_t streams, columns;   // columns: 2 + streams
    int64_t turns;
    float eps;
};
constexpr int64_t kMostStreams = 8;  // that are balanced and blended

// Rows of streams become one row, their sum by the gains of each, or their mean without gains. With what is added each
// becomes the sum of all by the gains that say so, and of what is added by the stream's own.
struct BlendStreamsCall {
    const float* x;      // (rows, streams, columns)
    const float* gains;  // (rows, (2 + streams) * streams), or null
    const float* added;  // (rows, columns), or null
    float* out;          // (rows, columns), or with `added` as x, and may be x
    int64_t streams, columns;
};

// Of rows of streams the first becomes `base`, and each other is scaled to be as long as that, whatever its mean square
// is, but for one below `least`.
struct LevelStreamsCall {
    const float* x;     // (rows, streams, columns)
    const float* base;  // (rows, columns)
    float* out;         // as x
    int64_t streams, columns;
    float least;
};

// Of rows their first `columns` numbers less their mean and `factor` times their deviation, or 0 where that is below.
struct CutGatesCall {
    const float* x;  // (rows, columns) in rows of x_stride
    int64_t x_stride;
    float* out;  // the same, and may be x
    int64_t columns;
    float factor;
};

// How experts are chosen by their logits, and what each one's share is: scores are the softmax of all logits or the
// sigmoid of each, and shares are the scores of the chosen; or logits choose, and shares are the softmax of the chosen.
// With the sparsemixer logits choose, too, and a share is that of the chosen one in the softmax of the logits x that
// are left and not too far below it, m: (m - x) / max(|x|, m) is at most `gap`.
enum class Scoring : int { softmax, sigmoid, softmax_chosen, sparsemixer };
constexpr int64_t kMostExperts = 1024;

struct RouteCall {
    const float* logits;  // (rows, experts)
    int64_t experts, used;
    Scoring scoring;
    int64_t groups, groups_used;  // of experts; those whose two best have the largest sum are used
    bool renormalises;            // shares are divided by their sum and floor
    float floor, scale, gap;
    const float *choice_bias, *expert_scales;  // (experts), or null
    int32_t* chosen;                           // (rows, used)
    float* shares;                             // (rows, used)
};

// out[row] = the sum over ranks of shares[row][rank] * made[places[row][rank]], each next one by a fused multiply-add.
struct MixRowsCall {
    const float* made;  // (any, columns)
    int64_t columns, used;
    const int32_t* places;  // (rows, used)
    const float* shares;    // (rows, used)
    float* out;             // (rows, columns)
};

// How pages keep their numbers: rows of head_dim numbers, or bf16 or int8 packed in pairs (packed_pages.h).
enum class PageType : int { f32, f16, bf16, q8 };

// Whether it is read as pairs of bf16.
static inline bool is_packed(PageType type) {
    return type == PageType::bf16 || type == PageType::q8;
}
// Bytes beside the head_dim numbers of a position: the scale of int8.
constexpr int64_t kScaleBytes = 4;
static inline int64_t scale_bytes(PageType type) {
    return type == PageType::q8 ? kScaleBytes : 0;
}

// Bytes of the head_dim numbers of a position, and what belongs to them.
static inline int64_t row_bytes(PageType type, int64_t head_dim) {
    const int64_t number_bytes = type == PageType::f32 ? 4 : type == PageType::q8 ? 1 : 2;
    return number_bytes * head_dim + scale_bytes(type);
}

struct WritePagesCall {
    const float* rows;  // (tokens, kv_heads, head_dim): keys or values
    int64_t token_stride;
    int64_t tokens, kv_heads, page_size, head_dim;
    const int32_t* slots;  // (tokens): page * page_size + offset
    void* pool;            // (pages, kv_heads, page_size, head_dim), or head_dim + 4 bytes for q8
    PageType type;
    bool values;  // not keys: what is packed differs
};

// Positions are cut into tiles and chunks that start at multiples of these, whatever is asked: the softmax is
// computed online over the tiles of a chunk (at once over a chunk of bf16 pages), and the chunks of a row are merged in
// ascending order. Both are
// part of the meaning of the numbers; changing one changes bits.
constexpr int kTilePositions = 32;
constexpr int kChunkPositions = 256;
// Rows (query token, query head of one KV head) that are processed together against each tile.
constexpr int kBlockRows = 32;
constexpr int kPackedBlockRows = 48;  // the same for packed pages

constexpr int64_t kAllPositions = int64_t{1} << 40;  // a window that is none

struct AttendCall {
    const float* q;  // (tokens, heads, head_dim)
    int64_t q_stride;
    const void* k_pool;  // (pages, kv_heads, page_size, head_dim)
    const void* v_pool;  // not read where values are in keys
    PageType type;
    int64_t heads, kv_heads, group, page_size, head_dim;
    int64_t value_dim;                 // numbers of a value
    bool values_in_keys;               // a value is the last value_dim numbers of its key
    int64_t padded_dim, padded_value;  // both rounded up to lanes
    float scale;
    float softcap;                   // c: a score becomes c tanh(score / c); 0 for none
    const float* sinks;              // (heads): of each head e**sink is added to the sum of its weights; or null
    const float* biases;             // (heads, 2 bias_span + 1): what scores of softcap 0 get by how far the key stands
    int64_t bias_span;               // behind the query, from -bias_span on; farther ones as the last; or null
    int64_t window;                  // positions seen, the own included
    bool symmetric;                  // as many after the own position are seen as before it
    bool chunked;                    // the positions of the own chunk of `window` are seen up to the own one
    const int32_t* query_starts;     // (sequences + 1)
    const int32_t* context_lengths;  // (sequences)
    const int32_t* page_table;       // (sequences, table_stride)
    int64_t table_stride;
    const int32_t* ends;  // (tokens): where the positions end that each sees; null where that follows from its own one
    float* out;           // (tokens, heads * value_dim)
};

// The first position that a query sees whose own one ends at `own`.
inline int64_t start_of_seen(const AttendCall& call, int64_t own) {
    if (call.chunked) return (own - 1) / call.window * call.window;
    return own > call.window ? own - call.window : 0;
}

// Where the positions end that the query of a token sees, whose own one ends at `own`, in a context of `length`.
inline int64_t end_of_seen(const AttendCall& call, int64_t token, int64_t own, int64_t length) {
    if (call.ends != nullptr) return call.ends[token];
    if (!call.symmetric) return own;
    return length - own < call.window ? length : own + call.window - 1;
}

// Rows [row_first, row_last) of one KV head of one sequence: row = query * group + head within the group.
// With `partials` null the chunks are merged and written to out; else each chunk's state is left there for
// merging.
struct AttendTask {
    int32_t sequence, kv_head;
    int64_t row_first, row_last;
    int64_t low, high;  // positions that some row sees
    int64_t chunk_first, chunk_last;
    float* partials;         // (chunks, (rows, padded_value) o, (rows) m, (rows) s)
    const AttendTask* next;  // what the thread will probably do after it, or null
};

// Rows of activations to pairs of bf16, kept as the tier likes them. Tokens lie in tiles as in kernel_table.h, with
// pairs of columns for groups.
struct NarrowCall {
    const float* x;  // (tokens, columns), x_stride from one token to the next
    int64_t columns, x_stride, tile;
    uint32_t* words;  // kept_words of each pair; beside an odd last column stands a zero
};

// Tokens times bf16 weights in blocks of 32 rows, which hold for each pair of columns a word of each row.
struct DensePairsCall {
    const uint32_t* weights;
    int64_t columns, rows;
    const uint32_t* x;  // as narrowed
    int64_t tile;
    float* out;  // column 0 of this weight, token 0
    int64_t out_stride;
    const float* bias;  // (rows) or null
};

// How the matrices of low-rank updates keep their numbers.
enum class LoraType : int { f32, f16, bf16 };

// A low-rank update of some rows: out[out_rows[n], first_column + i] += scale * sum over r of b[r, i] * (a[r] .
// x[x_rows[n]]).
// Both matrices lie in tiles, so that each is read from front to end, and what fills up the last tiles is zeros: a in
// blocks of kLoraRanks ranks, in which kLoraGroup columns of each rank follow one another; b in blocks of kLoraColumns
// columns, in which the ranks do. Of kLoraGroup columns in bf16 number i of the first half stands before that of the
// second.
struct LoraCall {
    const float* x;  // (rows of a batch, columns)
    float* out;      // (rows of a batch, out_stride)
    int64_t columns, out_stride, first_column;
    const int32_t *x_rows, *out_rows;  // (count) of each: those that are read, and those that are updated
    int64_t count;
    const void *a, *b;
    LoraType type;
    int64_t rank, made;
    float scale;
    float* reduced;  // (count, reduced_stride): what a makes of x
    int64_t reduced_stride;
};
constexpr int64_t kMaxLoraRank = 256, kLoraRanks = 4, kLoraColumns = 64, kLoraGroup = 32;

struct LogitScan {
    float peak;          // the greatest; -inf when there is none above
    int64_t best;        // its first index
    int64_t not_number;  // the first index of not-a-number, -1 if there is none
};
constexpr int64_t kScanBlock = 512;

struct OperatorTable {
    int64_t kept_words;  // of a pair of bf16 among narrowed rows: 1, or 2 where each number is an f32 (pairs.inc)
    void (*rms_norm)(const RmsNormCall& call, int64_t row_first, int64_t row_last);
    void (*layer_norm)(const LayerNormCall& call, int64_t row_first, int64_t row_last);
    void (*rope)(const RopeCall& call, int64_t token_first, int64_t token_last);
    void (*activate)(const ActivateCall& call, int64_t row_first, int64_t row_last, int64_t column_first,
                     int64_t column_last);
    void (*scale)(const ScaleCall& call, int64_t first, int64_t last);
    void (*add)(const AddCall& call, int64_t first, int64_t last);
    void (*gate_heads)(const GateHeadsCall& call, int64_t row_first, int64_t row_last);
    void (*mix_streams)(const MixStreamsCall& call, int64_t row_first, int64_t row_last);
    void (*spread_streams)(const SpreadStreamsCall& call, int64_t row_first, int64_t row_last);
    void (*match_streams)(const MatchStreamsCall& call, int64_t row_first, int64_t row_last);
    void (*balance_streams)(const BalanceStreamsCall& call, int64_t row_first, int64_t row_last);
    void (*blend_streams)(const BlendStreamsCall& call, int64_t row_first, int64_t row_last);
    void (*level_streams)(const LevelStreamsCall& call, int64_t row_first, int64_t row_last);
    void (*cut_gates)(const CutGatesCall& call, int64_t row_first, int64_t row_last);
    // Blocks of a for some of the call's rows; then, when all of these are there, blocks of b.
    void (*lora_reduce)(const LoraCall& call, int64_t block_first, int64_t block_last, int64_t first, int64_t last);
    void (*lora_expand)(const LoraCall& call, int64_t block_first, int64_t block_last, int64_t first, int64_t last);
    void (*route)(const RouteCall& call, int64_t row_first, int64_t row_last);
    void (*mix_rows)(const MixRowsCall& call, int64_t row_first, int64_t row_last, int64_t column_first,
                     int64_t column_last);
    void (*write_pages)(const WritePagesCall& call, int64_t head);

    void (*narrow_rows)(const NarrowCall& call, int64_t token_first, int64_t token_last);
    // token_first is the start of a tile, or all tokens are in one.
    void (*multiply_dense_pairs)(const DensePairsCall& call, int64_t block_first, int64_t block_last,
                                 int64_t token_first, int64_t token_last);

    void (*short_conv)(const ShortConvCall& call, int64_t token_first, int64_t token_last);
    // What the sequences keep; after or before the other.
    void (*short_conv_states)(const ShortConvCall& call, int64_t sequence_first, int64_t sequence_last);
    void (*prepare_recurrence)(const PrepareRecurrenceCall& call, int64_t token_first, int64_t token_last);
    // The queries and keys of one head of those tokens: (tokens, rows) each, packed.
    void (*norm_keys)(const PrepareRecurrenceCall& call, int64_t key_head, int64_t token_first, int64_t token_last,
                      float* q, float* k);
    // `scratch` has room for rows * kRecurrenceColumns.
    void (*recur)(const RecurrenceCall& call, const RecurrenceTask& task, const KeyRows& keys, float* scratch);
    // One part of the channels of a sequence, in `scratch` of scan_scratch_floats.
    void (*scan)(const ScanCall& call, int64_t sequence, int64_t part, float* scratch);
    void (*gated_norm)(const GatedNormCall& call, int64_t row_first, int64_t row_last);

    // Bytes of scratch that one thread needs in attend.
    int64_t (*attend_scratch_bytes)(const AttendCall& call);
    void (*attend)(const AttendCall& call, const AttendTask& task, void* scratch);
    // Merges the partials of one block of rows: `task` spans all its chunks.
    void (*attend_merge)(const AttendCall& call, const AttendTask& task);

    // Copies the logits whose bit in `mask` is set; the others become -inf.
    void (*mask_logits)(const float* logits, const uint32_t* mask, int64_t count, float* masked);
    // block_peaks: one per kScanBlock logits, the greatest of each.
    LogitScan (*scan_logits)(const float* logits, int64_t count, float* block_peaks);
    // Sum of the terms e**((logit - peak) * factor), which also go to `terms` unless it is null.
    double (*sum_exponentials)(const float* logits, int64_t count, float peak, float factor, float* terms);
    // The same for a row that is -inf but at `ids`, rising, of which `logits` are the values, with a factor of 1: the
    // same bits. `terms` has room for as many.
    double (*sum_few_exponentials)(const float* logits, const int32_t* ids, int64_t count, float peak, float* terms);
    // Indices of logits >= threshold, ascending; at most `count`. Returns how many.
    int64_t (*collect_logits)(const float* logits, int64_t count, float threshold, int32_t* indices);
};

// The table of an available tier.
const OperatorTable* operator_table(Isa isa);

}  // namespace mlxr

extern "C" {  // as far as the tiers are compiled
const mlxr::OperatorTable* mlxr_operators_portable() noexcept;
const mlxr::OperatorTable* mlxr_operators_avx2() noexcept;
const mlxr::OperatorTable* mlxr_operators_avx512() noexcept;
const mlxr::OperatorTable* mlxr_operators_avx512bf16() noexcept;
const mlxr::OperatorTable* mlxr_operators_neon() noexcept;
const mlxr::OperatorTable* mlxr_operators_amx() noexcept;
}
