// Many tokens: pieces of 64 rows are claimed one by one; their panels stay in the second-level cache while all tokens
// pass, a tile at a time, which then meets both panels while it is in the first-level cache.
#include <algorithm>

#include "linear/call.h"

namespace mlxr {

namespace {

using Part = LinearWeight::Part;

// The last panels for each thread go one by one, and their tokens are cut, so that the threads end together.
constexpr int64_t kLastPanels = 4;
constexpr int64_t kLastPanelTokens = 132;

// Pieces that need no panels are longer, as each begins with nothing at hand.
constexpr int64_t kRowsPanels = 8;

// Cuts [0, tokens) into `cuts` shares of whole tiles.
int64_t token_at(int64_t tokens, int64_t cut, int64_t cuts) {
    const int64_t tiles = (tokens + kTileTokens - 1) / kTileTokens;
    return std::min(tokens, tiles * cut / cuts * kTileTokens);
}

// A piece of dense weights, or of few enough tokens that panels do not pay.
void multiply_rows(const Piece& piece) {
    const LinearCall& call = *piece.call;
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

void Upcoming::add(const LinearCall& call, const Part& part, int64_t index, int64_t chunk) {
    const PanelChunks chunks(call, part.type);
    const int64_t unit_bytes = kernels_of(call, part.type).unit_bytes, first = chunks.first_unit(chunk);
    for (int64_t block = 2 * index; block < std::min(2 * index + 2, part.blocks) && count_ < kMost; ++block) {
        blocks_[count_++] = part.memory.data() + block * part.block_bytes + first * unit_bytes;
    }
    bytes_ = std::max(bytes_, (chunks.first_unit(chunk + 1) - first) * unit_bytes);
}

void Upcoming::fetch(int64_t share, int64_t shares) const {
    constexpr int64_t kLine = 64;
    const int64_t lines = (bytes_ + kLine - 1) / kLine;
    const int64_t last = std::min(lines, lines * (share + 1) / shares);
    for (int64_t line = lines * share / shares; line < last; ++line) {
        for (int i = 0; i < count_; ++i) __builtin_prefetch(blocks_[i] + kLine * line, 0, 2);
    }
}

// Panels of a piece, chunk after chunk; the tokens a step after another.
void PieceTasks::multiply(const Piece& piece, const Upcoming& next, uint8_t* panels) const {
    const LinearCall& call = *piece.call;
    const int64_t stride = call.stride();
    const int64_t chunks = PanelChunks(call, piece.part->type).count;
    const int64_t most = kernels_of(call, piece.part->type).panel_tokens;
    const int64_t steps = (piece.last_token - piece.first_token + most - 1) / most;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        Upcoming own;  // the next chunk
        for (int64_t i = 0; i < piece.panels; ++i) {
            unpack_panel(call, *piece.part, piece.first_panel + i, chunk, panels + panel_bytes_ * i);
            if (chunk + 1 < chunks) own.add(call, *piece.part, piece.first_panel + i, chunk + 1);
        }
        const Upcoming& upcoming = chunk + 1 < chunks ? own : next;
        for (int64_t step = 0; step < steps; ++step) {
            const int64_t first = piece.first_token + step * most;
            const int64_t last = std::min(first + most, piece.last_token);
            for (int64_t i = 0; i < piece.panels; ++i) {
                const int64_t index = piece.first_panel + i;
                float* const out = call.out + first * stride + piece.part->first_column + kPanelRows * index;
                upcoming.fetch(step * piece.panels + i, steps * piece.panels);
                multiply_panel(call, *piece.part, index, chunk, panels + panel_bytes_ * i, first, last, out, stride);
            }
        }
    }
}

PieceTasks::PieceTasks(std::span<const LinearCall> calls, int threads) {
    for (const LinearCall& call : calls) panel_bytes_ = std::max(panel_bytes_, panel_bytes_of(call));
    cut(calls, threads);
}

void PieceTasks::cut(std::span<const LinearCall> calls, int threads) {
    int64_t left = 0;
    for (const LinearCall& call : calls) {
        for (const Part& part : call.weight.parts()) left += panels_of(part);
    }
    const int64_t last_panels = kLastPanels * threads;
    const auto cut_part = [&](const LinearCall& call, const Part& part) {
        const int64_t panels = panels_of(part), tokens = call.tokens();
        const int64_t cuts = std::max<int64_t>(1, tokens / kLastPanelTokens);
        const bool unpacks = choose_kernel(call, part) == KernelName::panels;
        const int64_t most = unpacks ? kPiecePanels : kRowsPanels;
        for (int64_t panel = 0; panel < panels;) {
            if (left > last_panels) {
                const int64_t count = std::min({most, panels - panel, left - last_panels});
                pieces_.push_back({&call, &part, panel, count, 0, tokens});
                panel += count;
                left -= count;
                continue;
            }
            for (int64_t cut = 0; cut < cuts; ++cut) {
                pieces_.push_back(
                    {&call, &part, panel, 1, token_at(tokens, cut, cuts), token_at(tokens, cut + 1, cuts)});
            }
            ++panel;
            --left;
        }
    };
    for (const LinearCall& call : calls) {
        for (const Part& part : call.weight.parts()) cut_part(call, part);
    }
}

// Of tokens in one tile the row kernels take all, whether there are several parts that differ in this or not.
void PieceTasks::run(int task, int next, std::byte* scratch) const {
    const Piece& piece = pieces_[static_cast<size_t>(task)];
    if (choose_kernel(*piece.call, *piece.part) != KernelName::panels) return multiply_rows(piece);
    Upcoming upcoming;
    if (next < count()) {
        const Piece& after = pieces_[static_cast<size_t>(next)];
        if (choose_kernel(*after.call, *after.part) == KernelName::panels) {
            for (int64_t i = 0; i < after.panels; ++i) upcoming.add(*after.call, *after.part, after.first_panel + i, 0);
        }
    }
    multiply(piece, upcoming, reinterpret_cast<uint8_t*>(scratch));
    end_panels(*piece.call);
}

void multiply_many(const LinearCall& call) {
    ThreadPool& pool = call.runtime.pool;
    const PieceTasks tasks({&call, 1}, pool.threads());
    std::byte* const scratch =
        call.runtime.scratch(Scratch::panels, static_cast<size_t>(tasks.scratch_bytes() * pool.threads()));
    pool.parallel_for(tasks.count(), [&](int task, int thread) {
        tasks.run(task, task + pool.threads(), scratch + tasks.scratch_bytes() * thread);
    });
}

}  // namespace mlxr
