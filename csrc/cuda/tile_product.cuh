// Small matrix products by a block, C = A B, from shared memory (or its stand-in in global memory).
//
// In float32 a thread computes a tile of 4 x 4: each step of 4 along k loads 4 float4 of either
// factor for 64 multiply-adds. On tensor cores a warp computes tiles of 16 x 8 (mma.cuh).
// Leading dimensions are odd multiples of 4 where rows are read side by side: no bank conflicts.
#pragma once

#include "call_memory.h"
#include "mma.cuh"

namespace torchrec_tt::cuda {

// Columns that lie in pieces: `width` together, the next piece `ld` further on.
struct Columns {
  int width, ld;
  __device__ int operator()(int column) const {
    return column / width * ld + column % width;
  }
};

// The sizes that the products of a batch have in common. A is [m, k] in rows of lda, or [k, m]; B is
// [n, k] in rows of ldb, or [k, n]. k may go over several blocks, a_step and b_step apart.
struct Product {
  int batches, m, n, k;
  int lda, ldb;
  int a_step, b_step;
  Columns b_columns;  // of B [k, n]
};

struct Factors {
  const float* a;
  const float* b;
  int blocks;  // of k
};

// A 4 x 4 piece of a factor. Rows along k: f[i][j] is (row tile + i * tiles, k + j), rows past the
// last one repeat it. Else f[i][j] is (k + i, column + j), zero from `depth` on.
template <bool kAlongK>
__device__ inline void load_fragment(const float* at, int ld, int tile, int tiles, int rows,
                                     int column, int k, int depth, float (&f)[4][4]) {
  TT_UNROLL for (int i = 0; i < 4; i++) {
    float4 v = make_float4(0, 0, 0, 0);
    if constexpr (kAlongK) {
      v = *reinterpret_cast<const float4*>(at + min(tile + i * tiles, rows - 1) * ld + k);
    } else if (k + i < depth) {
      v = *reinterpret_cast<const float4*>(at + (k + i) * ld + column);
    }
    f[i][0] = v.x;
    f[i][1] = v.y;
    f[i][2] = v.z;
    f[i][3] = v.w;
  }
}

// store(batch, row, column, stride, values): values of columns column + j * stride, some past n.
template <bool kAlongKOfA, bool kAlongKOfB, typename FactorsOf, typename Store>
__device__ inline void float_product(const Product& p, const FactorsOf& factors_of,
                                     const Store& store) {
  const int tiles_m = (p.m + 3) / 4, tiles_n = (p.n + 3) / 4, tiles = tiles_m * tiles_n;
  for (int t = threadIdx.x; t < p.batches * tiles; t += kThreads) {
    const int batch = t / tiles, tm = t % tiles / tiles_n, tn = t % tiles_n;
    const Factors factors = factors_of(batch);
    const int column = kAlongKOfB ? 0 : p.b_columns(4 * tn);
    float sum[4][4] = {};
    for (int block = 0; block < factors.blocks; block++) {
      const float* at_a = factors.a + block * p.a_step;
      const float* at_b = factors.b + block * p.b_step;
      for (int k = 0; k < p.k; k += 4) {
        float a[4][4], b[4][4];
        load_fragment<kAlongKOfA>(at_a, p.lda, tm, tiles_m, p.m, 4 * tm, k, p.k, a);
        load_fragment<kAlongKOfB>(at_b, p.ldb, tn, tiles_n, p.n, column, k, p.k, b);
        TT_UNROLL for (int e = 0; e < 4; e++) {
          TT_UNROLL for (int i = 0; i < 4; i++) {
            TT_UNROLL for (int j = 0; j < 4; j++) {
              sum[i][j] += (kAlongKOfA ? a[i][e] : a[e][i]) * (kAlongKOfB ? b[j][e] : b[e][j]);
            }
          }
        }
      }
    }
    TT_UNROLL for (int i = 0; i < 4; i++) {
      const int row = kAlongKOfA ? tm + i * tiles_m : 4 * tm + i;
      if (row < p.m) store(batch, row, kAlongKOfB ? tn : 4 * tn, kAlongKOfB ? tiles_n : 1, sum[i]);
    }
  }
}

// The same of one batch; factors are zero up to the next multiple of 16 of m (of A) and of k.
template <Precision kPrecision, bool kAlongKOfA, bool kAlongKOfB, int kTiles, typename FactorsOf,
          typename Store>
__device__ inline void mma_product(const Product& p, const FactorsOf& factors_of,
                                   const Store& store) {
  const int tiles_m = (p.m + 15) / 16, tiles_n = (p.n + 8 * kTiles - 1) / (8 * kTiles);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr int kDepth = kMmaDepth<kPrecision>, kPair = kDepth / 8;
  const int row_step_a = kAlongKOfA ? p.lda : 1, k_step_a = kAlongKOfA ? 1 : p.lda;
  const int k_step_b = kAlongKOfB ? 1 : p.ldb;
  const Factors factors = factors_of(0);
  for (int tile = warp; tile < tiles_m * tiles_n; tile += kWarps) {
    const int row = tile / tiles_n * 16 + g, first = tile % tiles_n * 8 * kTiles;
    float sum[kTiles][4] = {};
    for (int block = 0; block < factors.blocks; block++) {
      const float* at_a = factors.a + block * p.a_step + row * row_step_a;
      const float* at_b = factors.b + block * p.b_step;
      for (int k = 0; k < p.k; k += kDepth) {
        uint32_t a[4], b[2];
        TT_UNROLL for (int i = 0; i < 4; i++) {
          const int at_k = k + (t + i / 2 * 4) * kPair;
          a[i] = mma_register<kPrecision>(at_a + i % 2 * 8 * row_step_a + at_k * k_step_a, k_step_a);
        }
        TT_UNROLL for (int j = 0; j < kTiles; j++) {
          const int column = first + 8 * j;
          if (column >= p.n) break;
          const int at_column = kAlongKOfB ? (column + g) * p.ldb : p.b_columns(column) + g;
          TT_UNROLL for (int i = 0; i < 2; i++) {
            const int at_k = k + (t + i * 4) * kPair;
            b[i] = mma_register<kPrecision>(at_b + at_column + at_k * k_step_b, k_step_b);
          }
          mma<kPrecision>(sum[j], a, b);
        }
      }
    }
    TT_UNROLL for (int j = 0; j < kTiles; j++) {
      TT_UNROLL for (int i = 0; i < 2; i++) {
        const float pair[2] = {sum[j][2 * i], sum[j][2 * i + 1]};
        if (row + 8 * i < p.m) store(0, row + 8 * i, first + 8 * j + 2 * t, 1, pair);
      }
    }
  }
}

// A product with a mid slice, in the call's precision; kTiles of mma in a row of C by one warp.
template <Precision kPrecision, bool kAlongKOfA, bool kAlongKOfB, int kTiles, typename FactorsOf,
          typename Store>
__device__ inline void mid_product(const Product& p, const FactorsOf& factors_of,
                                   const Store& store) {
  if constexpr (kPrecision == Precision::kFloat32) {
    float_product<kAlongKOfA, kAlongKOfB>(p, factors_of, store);
  } else {
    mma_product<kPrecision, kAlongKOfA, kAlongKOfB, kTiles>(p, factors_of, store);
  }
}

// Calls f(column, value) for the values that lie in [0, n).
template <int kCount, typename F>
__device__ inline void for_columns(const float (&values)[kCount], int column, int stride, int n,
                                   const F& f) {
  TT_UNROLL for (int j = 0; j < kCount; j++) {
    if (column + j * stride < n) f(column + j * stride, values[j]);
  }
}

}  // namespace torchrec_tt::cuda
