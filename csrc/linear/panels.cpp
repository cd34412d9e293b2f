// Many tokens: pieces of 64 rows are claimed one by one; their panels stay in the second-level cache while all tokens
// pass, a tile at a time, which then meets both panels while it is in the first-level cache.
#include <algorithm>
#include <vector>

#include "linear/call.h"

namespace mlxr {

namespace {

using Part = LinearWeight::Part;

// What one thread takes at a time.
struct Piece {
    const Part* part;
    int64_t first_panel, panels;
    int64_t first_token, last_token;
};

constexpr int64_t kPiecePanels = 2;
// The last panels for each thread go one by one, and their tokens are cut, so that the threads end together.
constexpr int64_t kLastPanels = 4;
constexpr int64_t kLastTokens = 132;

// Cuts [0, tokens) into `cuts` shares of whole tiles.
int64_t token_at(int64_t tokens, int64_t cut, int64_t cuts) {
    const int64_t tiles = (tokens + kTileTokens - 1) / kTileTokens;
    return std::min(tokens, tiles * cut / cuts * kTileTokens);
}

std::vector<Piece> cut_pieces(const LinearCall& call) {
    int64_t left = 0;
    for (const Part& part : call.weight.parts()) left += panels_of(part);
    const int64_t last_panels = kLastPanels * call.runtime.pool.threads();
    const int64_t cuts = std::max<int64_t>(1, call.tokens / kLastTokens);
    std::vector<Piece> pieces;
    for (const Part& part : call.weight.parts()) {
        const int64_t panels = panels_of(part);
        for (int64_t panel = 0; panel < panels;) {
            if (left > last_panels) {
                const int64_t count = std::min({kPiecePanels, panels - panel, left - last_panels});
                pieces.push_back({&part, panel, count, 0, call.tokens});
                panel += count;
                left -= count;
                continue;
            }
            for (int64_t cut = 0; cut < cuts; ++cut) {
                pieces.push_back(
                    {&part, panel, 1, token_at(call.tokens, cut, cuts), token_at(call.tokens, cut + 1, cuts)});
            }
            ++panel;
            --left;
        }
    }
    return pieces;
}

// Panels of a piece, chunk after chunk; the tokens tile after tile.
void multiply_piece(const LinearCall& call, const Piece& piece, uint8_t* panels, int64_t panel_bytes) {
    const int64_t stride = call.weight.out_features();
    const int64_t chunks = PanelChunks(call, piece.part->type).count;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        for (int64_t i = 0; i < piece.panels; ++i) {
            unpack_panel(call, *piece.part, piece.first_panel + i, chunk, panels + panel_bytes * i);
        }
        for (int64_t first = piece.first_token; first < piece.last_token; first += kTileTokens) {
            const int64_t last = std::min(first + kTileTokens, piece.last_token);
            for (int64_t i = 0; i < piece.panels; ++i) {
                const int64_t index = piece.first_panel + i;
                float* const out = call.out + first * stride + piece.part->first_column + kPanelRows * index;
                multiply_panel(call, *piece.part, index, chunk, panels + panel_bytes * i, first, last, out, stride);
            }
        }
    }
}

// A piece of dense weights, or of few enough tokens that panels do not pay.
void multiply_rows(const LinearCall& call, const Piece& piece) {
    const int64_t first = piece.first_panel, last = first + piece.panels;
    if (is_dense(piece.part->type)) {
        return multiply_dense(call, *piece.part, first, last, piece.first_token, piece.last_token);
    }
    const int64_t step = kPanelRows / kRepackRows;
    multiply_blocks(call, *piece.part, step * first, std::min(step * last, piece.part->blocks));
}

}  // namespace

PanelChunks::PanelChunks(const LinearCall& call, Type type) {
    units = units_of(call, type);
    unit_groups = kernels_of(call, type).unit_columns / kGroupColumns;
    count = (units * unit_groups + kPanelGroups - 1) / kPanelGroups;
}

int64_t panel_bytes_of(const LinearCall& call) {
    int64_t group_bytes = 0;
    for (const Part& part : call.weight.parts()) {
        if (is_dense(part.type)) continue;
        group_bytes = std::max<int64_t>(group_bytes, kernels_of(call, part.type).panel_group_bytes);
    }
    // Balanced chunks of whole units hold up to kPanelGroups groups and a unit's 8 more.
    return align_line((kPanelGroups + 8) * group_bytes);
}

void unpack_panel(const LinearCall& call, const Part& part, int64_t index, int64_t chunk, uint8_t* panel) {
    const PanelChunks chunks(call, part.type);
    kernels_of(call, part.type)
        .unpack({.weights = part.memory.data(),
                 .units = chunks.units,
                 .blocks = part.blocks,
                 .block = index * (kPanelRows / kRepackRows),
                 .first_unit = chunks.first_unit(chunk),
                 .last_unit = chunks.first_unit(chunk + 1),
                 .panel = panel});
}

void multiply_panel(const LinearCall& call, const Part& part, int64_t index, int64_t chunk, const uint8_t* panel,
                    int64_t first, int64_t last, float* out, int64_t out_stride) {
    const PanelChunks chunks(call, part.type);
    const int64_t row = index * kPanelRows;
    const float* const bias = bias_of(part);
    kernels_of(call, part.type)
        .panel({.panel = panel,
                .first_group = chunks.first_unit(chunk) * chunks.unit_groups,
                .last_group = chunks.first_unit(chunk + 1) * chunks.unit_groups,
                .activations = &activations_of(call, part.type),
                .first_token = first,
                .last_token = last,
                .out = out,
                .out_stride = out_stride,
                .rows = std::min<int64_t>(kPanelRows, part.rows - row),
                .bias = bias == nullptr || chunk + 1 < chunks.count ? nullptr : bias + row});
}

void multiply_many(const LinearCall& call) {
    const int64_t panel_bytes = panel_bytes_of(call);
    const size_t scratch_bytes = static_cast<size_t>(kPiecePanels * panel_bytes * call.runtime.pool.threads());
    std::byte* const scratch = call.runtime.scratch(Scratch::panels, scratch_bytes);
    // Of tokens in one tile the row kernels take all, whether there are several parts that differ in this or not.
    const std::vector<Piece> pieces = cut_pieces(call);
    call.runtime.pool.parallel_for(static_cast<int>(pieces.size()), [&](int task, int thread) {
        const Piece& piece = pieces[static_cast<size_t>(task)];
        if (choose_kernel(call, *piece.part) != KernelName::panels) return multiply_rows(call, piece);
        uint8_t* const panels = reinterpret_cast<uint8_t*>(scratch + kPiecePanels * panel_bytes * thread);
        multiply_piece(call, piece, panels, panel_bytes);
    });
}

}  // namespace mlxr
