// Some tokens: more than rows.h multiplies in one pass, fewer than make a panel of all columns pay. A strip is two
// blocks of rows; a chunk is some of its columns, unpacked into a panel (panel.h). While the first tile of tokens is
// multiplied with one chunk, the next is unpacked between its products, and each tile asks memory for its share of a
// later one: so what is not multiplication goes beside it. Sums as in rows.h, bit for bit.
#pragma once

#include "linear/panel.h"

namespace {

using mlxr::RowsJob;

constexpr int kChunkGroups = 8;  // two panels, activations and weights on their way fit into the first-level cache
constexpr int kAheadChunks = 4;  // between what is multiplied and what memory is asked for
constexpr int kStripBlocks = kPanelRows / kBlockRows;
constexpr int kMostStripTokens = mlxr::kManyTokens - 1;

// Some groups of a strip, at most kChunkGroups; none has no units.
struct Chunk {
    const uint8_t* blocks[kStripBlocks];  // its first unit in each; the same twice when there is but one
    int64_t first_group, units;
};

// The part of each vector of a register tile, from row `column` of a strip on, in the chunk's unit `unit`.
template <class W>
MLXR_INLINE Unit unit_of(const Chunk& chunk, int64_t unit, int column, int v) {
    const int vector = column / kLanes + v;
    return {chunk.blocks[vector / kParts] + unit * W::kUnitBytes, vector % kParts};
}

// Words 2*pair and 2*pair+1 of group n*kStride+J of the units.
template <class W, int J>
MLXR_INLINE void unpack_pair(const Unit* units, int n, uint8_t* at, int pair) {
    repeat<kTileVectors>([&](int v) MLXR_BODY {
        Ints w[8];
        W::template weights<J>(units[v], n, w);
        store_ints(at + kRowBytes * (2 * pair) + 4 * kLanes * v, w[2 * pair]);
        store_ints(at + kRowBytes * (2 * pair + 1) + 4 * kLanes * v, w[2 * pair + 1]);
    });
}

// Two streams that memory is asked for, `bytes` of each at a time.
struct Ahead {
    const uint8_t* next[2];
    int64_t bytes;
};
MLXR_INLINE void fetch_ahead(Ahead& ahead) {
    for (int64_t i = 0; i < ahead.bytes; i += 64) {
        __builtin_prefetch(ahead.next[0] + i);
        __builtin_prefetch(ahead.next[1] + i);
    }
    ahead.next[0] += ahead.bytes;
    ahead.next[1] += ahead.bytes;
}

// The current chunk and M tokens, group by group.
template <class W, int M>
struct Tile {
    const Activations a;
    const uint8_t *const head, *at;  // of the chunk; the next group
    int64_t item, left;              // groups
    Ahead ahead;
    Total<W::kForm> total[M > 0 ? M : 1][kTileVectors];
};

template <class W, int M, class Beside>
MLXR_INLINE void add_next_group(Tile<W, M>& tile, const Beside& beside) {
    fetch_ahead(tile.ahead);
    add_panel_group<W::kForm, W::kWide, W::kZeroPoint, M>(tile.at, tile.a, tile.item, tile.total, beside);
    tile.at += PanelGroup<W::kForm>::kBytes;
    tile.item += tile.a.tile;
    --tile.left;
}

// Unpacks groups n*kStride+J.. of the units, each beside the products of one group of the tile, while there are some.
template <class W, int M, int J>
MLXR_INLINE void unpack_beside(const Unit* units, int n, uint8_t* to, Tile<W, M>& tile) {
    if constexpr (J < W::kStride) {
        uint8_t* const group = to + (n * W::kStride + J) * PanelGroup<W::kForm>::kBytes;
        const auto unpack = [&](int pair) MLXR_BODY { unpack_pair<W, J>(units, n, group, pair); };
        if (M > 0 && tile.left > 0) {
            if constexpr (M > 0) add_next_group(tile, unpack);
        } else {
            repeat<4>(unpack);
        }
        unpack_beside<W, M, J + 1>(units, n, to, tile);
    }
}

// Unpacks a chunk's rows from `column` on, beside a tile.
template <class W, int M>
MLXR_INLINE void unpack_chunk(const Chunk& chunk, uint8_t* panel, int column, Tile<W, M>& tile) {
    using P = PanelGroup<W::kForm>;
    uint8_t* to = panel + 4 * column;
    for (int64_t unit = 0; unit < chunk.units; ++unit) {
        Unit units[kTileVectors];
        repeat<kTileVectors>([&](int v) MLXR_BODY {
            units[v] = unit_of<W>(chunk, unit, column, v);
            Scales s;
            W::scales(units[v], s);  // all at once, as none has to wait in memory then
            uint8_t* const at = to + 4 * kLanes * v;
            store_head<W::kForm>(at, s);
            for (int g = 0; g < W::kGroups; ++g) store_scales<W::kForm>(at + P::kHeadBytes + g * P::kBytes, s, g);
        });
        to += P::kHeadBytes;
        for (int n = 0; n < W::kGroups / W::kStride; ++n) unpack_beside<W, M, 0>(units, n, to, tile);
        to += W::kGroups * P::kBytes;
    }
}

// A tile of chunk `now`, whose part of the panel begins at `at`, before its first group.
template <class W, int M>
MLXR_INLINE Tile<W, M> start_tile(const Activations& a, const Chunk& now, const uint8_t* at, int64_t token,
                                  const float* sums, Ahead ahead) {
    using P = PanelGroup<W::kForm>;
    Tile<W, M> tile{a, at, at + P::kHeadBytes, now.first_group * a.tile + token, now.units * W::kGroups, ahead, {}};
    if constexpr (has_spans(W::kForm)) {
        start_panel_span<W::kForm, M>(at, a, now.first_group / mlxr::kSpanGroups * a.tile + token, tile.total);
    } else {
        repeat<M>([&](int m) MLXR_BODY {
            repeat<kTileVectors>([&](int v)
                                     MLXR_BODY { tile.total[m][v] = load_floats(sums + kPanelRows * m + kLanes * v); });
        });
    }
    return tile;
}

// After its last group.
template <class W, int M>
MLXR_INLINE void end_tile(const Tile<W, M>& tile, const Chunk& now, int64_t token, float* sums) {
    if constexpr (has_spans(W::kForm)) {
        const int64_t span = now.first_group / mlxr::kSpanGroups * tile.a.tile + token;
        add_panel_span<W::kForm, M>(tile.head, tile.a, span, tile.total, sums, kPanelRows);
    } else {
        repeat<M>([&](int m) MLXR_BODY {
            repeat<kTileVectors>([&](int v)
                                     MLXR_BODY { store_floats(sums + kPanelRows * m + kLanes * v, tile.total[m][v]); });
        });
    }
}

// M tokens from `token` on times kTileRows rows, from `column` on, of chunk `now`, which is unpacked in `panel`.
template <class W, int M>
void multiply_chunk_tile(const Activations& a, const Chunk& now, const uint8_t* panel, int64_t token, int column,
                         float* sums, Ahead ahead) {
    sums += kPanelRows * token + column;
    Tile<W, M> tile = start_tile<W, M>(a, now, panel + 4 * column, token, sums, ahead);
    while (tile.left > 0) add_next_group(tile, Alone{});
    end_tile(tile, now, token, sums);
}

// The same for the first tokens; meanwhile `next` is unpacked into `to`.
template <class W, int M>
void multiply_first_tile(const Activations& a, const Chunk& now, const uint8_t* panel, const Chunk& next, uint8_t* to,
                         int column, float* sums, Ahead ahead) {
    Tile<W, M> tile = start_tile<W, M>(a, now, panel + 4 * column, 0, sums + column, ahead);
    unpack_chunk<W, M>(next, to, column, tile);
    while (tile.left > 0) add_next_group(tile, Alone{});
    end_tile(tile, now, 0, sums + column);
}

template <class W, int M>
MLXR_INLINE void multiply_some_tokens(const Activations& a, const Chunk& now, const uint8_t* panel, int64_t token,
                                      int64_t tokens, float* sums, Ahead ahead) {
    if constexpr (M > 1) {
        if (tokens < M) return multiply_some_tokens<W, M - 1>(a, now, panel, token, tokens, sums, ahead);
    }
    for (int column = 0; column < kPanelRows; column += kTileRows) {
        multiply_chunk_tile<W, M>(a, now, panel, token, column, sums, ahead);
        ahead.bytes = 0;
    }
}

// Tokens [kPanelTokens, tokens) times the unpacked chunk `now`, tile by tile.
template <class W>
void multiply_other_tiles(const RowsJob& job, const Chunk& now, const uint8_t* panel, float* sums, Ahead ahead) {
    const int64_t bytes = ahead.bytes * now.units * W::kGroups;
    for (int64_t token = kPanelTokens; token < job.tokens; token += kPanelTokens) {
        for (const uint8_t*& next : ahead.next) next += bytes;
        multiply_some_tokens<W, kPanelTokens>(*job.activations, now, panel, token, job.tokens - token, sums, ahead);
    }
}

// Rows of a finished strip into the result.
MLXR_INLINE void store_strip(const RowsJob& job, int64_t row, const float* sums) {
    for (int64_t token = 0; token < job.tokens; ++token) {
        for (int column = 0; column < kPanelRows; column += kLanes) {
            const int valid = static_cast<int>(job.rows - row) - column;
            Floats sum = load_floats(sums + kPanelRows * token + column);
            if (job.bias != nullptr) sum = add(sum, load_some(job.bias + row + column, valid));
            store_some(job.out + token * job.out_stride + row + column, sum, valid);
        }
    }
}

// The chunks of a job, strip after strip. Of an odd number of blocks the last is multiplied twice.
template <class W>
struct Chunks {
    static constexpr int kUnits = kChunkGroups / W::kGroups;
    const RowsJob& job;
    int64_t per_strip, count;

    explicit Chunks(const RowsJob& job_)
        : job(job_),
          per_strip((job_.units + kUnits - 1) / kUnits),
          count((job_.last_block - job_.first_block + kStripBlocks - 1) / kStripBlocks * per_strip) {}

    int64_t block_of(int64_t index) const { return job.first_block + index / per_strip * kStripBlocks; }

    Chunk at(int64_t index) const {
        const int64_t block = block_of(index), unit = index % per_strip * kUnits, left = job.units - unit;
        const int64_t bytes = job.units * W::kUnitBytes;
        const uint8_t* const first = job.weights + block * bytes + unit * W::kUnitBytes;
        return {{first, block + 1 < job.last_block || index >= count ? first + bytes : first},
                unit * W::kGroups,
                index >= count  ? 0
                : left < kUnits ? left
                                : kUnits};
    }
};

// More tokens than one tile has.
template <class W>
void multiply_strips(const RowsJob& job) {
    constexpr int kPanelBytes = kChunkGroups * PanelGroup<W::kForm>::kMeanBytes;
    alignas(64) uint8_t panels[2 * kPanelBytes];
    alignas(64) float sums[kMostStripTokens * kPanelRows];
    const Chunks<W> chunks(job);
    const int64_t tiles = (job.tokens + kPanelTokens - 1) / kPanelTokens;
    Chunk now = chunks.at(0);
    Tile<W, 0> none{};
    for (int column = 0; column < kPanelRows; column += kTileRows) unpack_chunk<W>(now, panels, column, none);
    for (int64_t index = 0; index < chunks.count; ++index) {
        uint8_t* const panel = panels + index % 2 * kPanelBytes;
        uint8_t* const other = panels + (index + 1) % 2 * kPanelBytes;
        const Chunk next = chunks.at(index + 1), later = chunks.at(index + kAheadChunks);
        Ahead ahead{{later.blocks[0], later.blocks[1]}, W::kUnitBytes / W::kGroups / tiles};
        if (now.first_group == 0) memset(sums, 0, static_cast<size_t>(job.tokens) * kPanelRows * sizeof(float));
        for (int column = 0; column < kPanelRows; column += kTileRows) {
            multiply_first_tile<W, kPanelTokens>(*job.activations, now, panel, next, other, column, sums, ahead);
            ahead.bytes = 0;
        }
        ahead.bytes = W::kUnitBytes / W::kGroups / tiles;
        multiply_other_tiles<W>(job, now, panel, sums, ahead);
        if ((index + 1) % chunks.per_strip == 0) store_strip(job, chunks.block_of(index) * kBlockRows, sums);
        now = next;
    }
}

}  // namespace
