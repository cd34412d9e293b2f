// f32 and f16 weights times f32 activations: each output element is one chain of fused multiply-adds
// over ascending columns, for any number of tokens. The 32 rows of a block give the chains that keep the
// units busy.
#pragma once

#include "kernel_table.h"
#include "linear/lanes.h"

namespace {

using mlxr::DenseJob;
using mlxr::kDenseRows;

struct DenseF32 {
    static constexpr int kBytes = 4;
    MLXR_INLINE Floats load(const uint8_t* p) { return as_floats(load_ints(p)); }
};
struct DenseF16 {
    static constexpr int kBytes = 2;
    MLXR_INLINE Floats load(const uint8_t* p) { return load_f16(p); }
};

// Vectors of rows in a register tile, and tokens.
#if defined(MLXR_TIER_avx512)
constexpr int kDenseVectors = 2, kDenseTokens = 8;
#elif defined(MLXR_TIER_avx2)
constexpr int kDenseVectors = 4, kDenseTokens = 2;
#else
constexpr int kDenseVectors = 2, kDenseTokens = 2;
#endif

template <class W, int M>
void multiply_dense_tile(const DenseJob& job, int64_t block, int64_t token) {
    for (int first = 0; first < kDenseRows; first += kDenseVectors * kLanes) {
        const int64_t row = block * kDenseRows + first;
        const int valid = static_cast<int>(job.rows - row);
        if (valid <= 0) return;
        Floats total[M][kDenseVectors];
        const float* x[M];
        repeat<M>([&](auto m) MLXR_BODY {
            x[m] = job.x + (token + m) * job.columns;
            repeat<kDenseVectors>([&](auto v) MLXR_BODY { total[m][v] = splat(0.0f); });
        });
        const uint8_t* at = job.weights + (block * job.columns * kDenseRows + first) * W::kBytes;
        for (int64_t k = 0; k < job.columns; ++k, at += kDenseRows * W::kBytes) {
            prefetch_ahead(at, kDenseVectors * kLanes * W::kBytes);
            Floats w[kDenseVectors];
            repeat<kDenseVectors>([&](auto v) MLXR_BODY { w[v] = W::load(at + v * kLanes * W::kBytes); });
            repeat<M>([&](auto m) MLXR_BODY {
                const Floats value = splat(x[m][k]);
                repeat<kDenseVectors>([&](auto v) MLXR_BODY { total[m][v] = fma(value, w[v], total[m][v]); });
            });
        }
        repeat<M>([&](auto m) MLXR_BODY {
            repeat<kDenseVectors>([&](auto v) MLXR_BODY {
                const int left = valid - v * kLanes;
                if (job.bias != nullptr) total[m][v] = add(total[m][v], load_some(job.bias + row + v * kLanes, left));
                store_some(job.out + (token + m) * job.out_stride + row + v * kLanes, total[m][v], left);
            });
        });
    }
}

template <class W, int M>
MLXR_INLINE void multiply_dense_rest(const DenseJob& job, int64_t block, int64_t token) {
    if constexpr (M > 0) {
        if (job.tokens - token == M) {
            multiply_dense_tile<W, M>(job, block, token);
        } else {
            multiply_dense_rest<W, M - 1>(job, block, token);
        }
    }
}

template <class W>
void multiply_dense(const DenseJob& job) {
    for (int64_t block = job.first_block; block < job.last_block; ++block) {
        int64_t token = 0;
        for (; token + kDenseTokens <= job.tokens; token += kDenseTokens) {
            multiply_dense_tile<W, kDenseTokens>(job, block, token);
        }
        multiply_dense_rest<W, kDenseTokens - 1>(job, block, token);
    }
}

}  // namespace
