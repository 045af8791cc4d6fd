// How a block's working memory for a table is laid out, in floats.
#pragma once

#include "launchers.h"

namespace torchrec_tt::cuda {

constexpr int kHeadRowsAtOnce = 32;   // rows of heads that are multiplied with a mid slice at once
constexpr int kPrefixesAtOnce = 32;   // at most, where a head has one row
constexpr int kLastFloatsAtOnce = 2048;  // of last slices that are held at once
constexpr int kRowsAtOnce = 32;          // at most

__host__ __device__ inline int round_up_to(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The smallest odd multiple of 4: rows read side by side begin in different banks.
__host__ __device__ inline int odd_float4s(int value) {
  const int rounded = round_up_to(value, 4);
  return rounded % 8 == 0 ? rounded + 4 : rounded;
}

// The mid slice is [k_head, n_mid, k_rank] in rows of ld_mid, heads are [head_rows, k_head] in rows
// of ld_head, products [head_rows, n_mid, k_rank] in rows of ld_product and columns of ld_rank, a
// last slice is [rank, n_last] in rows of ld_last, a row's gradient [m_rows, n_last] as well.
struct BlockLayout {
  int prefixes, rows;     // at once
  int k_head, k_rank;     // r_head and rank rounded up to what a product steps by, zeros between
  int head_rows;
  int ld_head, ld_mid, ld_rank, ld_product, ld_last;
  int last_stride, row_stride;
  // where they begin; the last three in a backward only
  int mid, heads, products, lasts, grad_products, grad_mid, row_grads;
  int64_t size;
};

inline BlockLayout block_layout(const Table& t, Precision precision, bool is_backward) {
  BlockLayout at{};
  const int step = precision == Precision::kFloat32 || !t.has_mid ? 4 : 16;
  const auto at_most = [](int most, int value) { return value < 1 ? 1 : value < most ? value : most; };
  at.prefixes = at_most(kPrefixesAtOnce, kHeadRowsAtOnce / t.n_head);
  at.k_head = round_up_to(t.r_head, step);
  at.k_rank = round_up_to(t.rank, step);
  at.head_rows = round_up_to(at.prefixes * t.n_head, step);
  at.ld_head = odd_float4s(at.k_head);
  at.ld_mid = odd_float4s(t.n_mid * at.k_rank);
  at.ld_rank = odd_float4s(at.k_rank);
  at.ld_product = t.n_mid * at.ld_rank;
  at.ld_last = odd_float4s(t.n_last);
  at.last_stride = t.rank * at.ld_last;
  at.row_stride = t.m_rows() * at.ld_last;
  at.rows = at_most(kRowsAtOnce, kLastFloatsAtOnce / at.last_stride);
  const auto take = [&](int64_t rows, int64_t columns) {
    const int begin = static_cast<int>(at.size);
    at.size += rows * columns;
    return begin;
  };
  const int has_mid = t.has_mid ? 1 : 0;
  // Heads' gradients take the products' place.
  const int ld_products = at.ld_product < at.ld_head ? at.ld_head : at.ld_product;
  at.mid = take(has_mid * at.k_head, at.ld_mid);
  at.heads = take(has_mid * at.head_rows, at.ld_head);
  at.products = take(at.head_rows, ld_products);
  at.lasts = take(at.rows, at.last_stride);
  if (!is_backward) return at;
  at.grad_products = take(at.head_rows, at.ld_product);
  at.grad_mid = take(has_mid * at.k_head, at.ld_mid);
  at.row_grads = take(at.rows, at.row_stride);
  return at;
}

}  // namespace torchrec_tt::cuda
