// f32 weights times f32 activations: each output element is one chain of fused multiply-adds
// over ascending columns, for any number of tokens. The 32 rows of a block give the chains that keep the
// units busy.
#pragma once

#include "linear/lanes.h"
#include "runtime/kernel_table.h"

namespace {

using mlxr::DenseJob;
using mlxr::kDenseRows;

// Vectors of rows in a register tile, and tokens.
#if defined(MLXR_TIER_avx512)
constexpr int kDenseVectors = 2, kDenseTokens = 8;
#elif defined(MLXR_TIER_avx2)
constexpr int kDenseVectors = 4, kDenseTokens = 2;
#elif defined(MLXR_TIER_neon)
constexpr int kDenseVectors = 4, kDenseTokens = 4;
#else
constexpr int kDenseVectors = 2, kDenseTokens = 2;
#endif

template <int M>
void multiply_dense_tile(const DenseJob& job, int64_t block, int64_t token) {
    constexpr int kBytes = sizeof(float);
    for (int first = 0; first < kDenseRows; first += kDenseVectors * kLanes) {
        const int64_t row = block * kDenseRows + first;
        const int valid = static_cast<int>(job.rows - row);
        if (valid <= 0) return;
        Floats total[M][kDenseVectors];
        const float* x[M];
        repeat<M>([&](int m) MLXR_BODY {
            x[m] = job.x + (token + m) * job.columns;
            repeat<kDenseVectors>([&](int v) MLXR_BODY { total[m][v] = splat(0.0f); });
        });
        const uint8_t* at = job.weights + (block * job.columns * kDenseRows + first) * kBytes;
        for (int64_t k = 0; k < job.columns; ++k, at += kDenseRows * kBytes) {
            prefetch_ahead(at, kDenseVectors * kLanes * kBytes);
            Floats w[kDenseVectors];
            repeat<kDenseVectors>([&](int v) MLXR_BODY { w[v] = as_floats(load_ints(at + v * kLanes * kBytes)); });
            repeat<M>([&](int m) MLXR_BODY {
                const Floats value = splat(x[m][k]);
                repeat<kDenseVectors>([&](int v) MLXR_BODY { total[m][v] = fma(value, w[v], total[m][v]); });
            });
        }
        repeat<M>([&](int m) MLXR_BODY {
            repeat<kDenseVectors>([&](int v) MLXR_BODY {
                const int left = valid - v * kLanes;
                if (job.bias != nullptr) total[m][v] = add(total[m][v], load_some(job.bias + row + v * kLanes, left));
                store_some(job.out + (token + m) * job.out_stride + row + v * kLanes, total[m][v], left);
            });
        });
    }
}

template <int M>
MLXR_INLINE void multiply_dense_rest(const DenseJob& job, int64_t block, int64_t token) {
    if constexpr (M > 0) {
        if (job.tokens - token == M) {
            multiply_dense_tile<M>(job, block, token);
        } else {
            multiply_dense_rest<M - 1>(job, block, token);
        }
    }
}

void multiply_dense(const DenseJob& job) {
    for (int64_t block = job.first_block; block < job.last_block; ++block) {
        int64_t token = 0;
        for (; token + kDenseTokens <= job.tokens; token += kDenseTokens) {
            multiply_dense_tile<kDenseTokens>(job, block, token);
        }
        multiply_dense_rest<kDenseTokens - 1>(job, block, token);
    }
}

}  // namespace
