// The gradient of a unique row: the sum over its indices of their bags' gradients, scaled.
//
// A row of up to kPiece indices is summed where it is needed. The sorted positions of longer rows,
// which may be as long as the batch, are cut at multiples of kPiece; every piece is summed by a warp
// of its own, then a row's pieces in order. A long row holds a multiple of kPiece: its sum lies in
// the place of that piece. Sums depend on no thread order.
#pragma once

#include "bags.h"

namespace torchrec_tt::cuda {

constexpr int kPiece = 32;

struct RowGradients {
  const float* grad_output;
  int64_t* grad_at;     // [N] where an index's bag begins in grad_output
  float* scale;         // [N] weight over mean length, or null for 1
  float* weight_scale;  // [N] 1 over mean length, or null for 1
  float* pieces;        // [N / kPiece + 1, ld_pieces]
  int64_t ld_pieces;
  int of_cached;  // whether long rows are summed that are cached, or those of the cores
};

__device__ inline float scaled_gradient(const RowGradients& g, int index, int column) {
  const float value = g.grad_output[g.grad_at[index] + column];
  return g.scale ? g.scale[index] * value : value;
}

__device__ inline int first_piece(int begin) { return (begin + kPiece - 1) / kPiece; }

// A column of the gradient of unique row u.
__device__ inline float row_gradient(const RowGradients& g, const PlanView& plan, int u, int column) {
  const int begin = plan.row_starts[u], end = plan.row_starts[u + 1];
  if (end - begin > kPiece) return g.pieces[first_piece(begin) * g.ld_pieces + column];
  float sum = 0;
  for (int p = begin; p < end; p++) sum += scaled_gradient(g, plan.order[p], column);
  return sum;
}

// Fills grad_at, the scales and the sums of long rows.
void launch_row_gradients(const Call& call, const Device& device, const Bags& bags,
                          const RowGradients& g, cudaStream_t stream);

}  // namespace torchrec_tt::cuda
