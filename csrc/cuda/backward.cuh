// What the kernel of the gradients is given, and where it leaves what it sums.
#pragma once

#include "prefix_batch.cuh"
#include "row_gradients.cuh"

namespace torchrec_tt::cuda {

// Deterministic sums. A block then takes whole groups of prefixes, whose mid gradients it owns;
// gradients of heads and last slices are left as terms, one a prefix and one a row, and summed per
// target in order (ordered_sums.cu). Rows are taken in turns, so that terms stay few.
struct OrderedTerms {
  int first_row, num_rows;  // of the turn
  int64_t ld;
  float* terms;       // [2 * num_rows, ld]: of rows, then of prefixes
  uint32_t* targets;  // [2 * num_rows]
};

struct BackwardCall {
  RowGradients row_grads;
  float* grad_heads;  // 4 cores, like Call::heads
  int32_t* touched;   // or null
  int is_ordered;
  OrderedTerms ordered;
};

// The prefix that holds a row.
__device__ inline int prefix_of(const PlanView& plan, int row, int num_prefixes) {
  int low = 0, high = num_prefixes - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (plan.prefix_starts[middle] <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace torchrec_tt::cuda
