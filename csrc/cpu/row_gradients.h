// What a unique row, of the cores or of the cache, gets from the gradients of its indices.
#pragma once

#include "prefix_batch.h"

namespace torchrec_tt::TT_ISA {

// The gradient of unique row u, summed over its indices in order: in `scratch`, or in place.
template <typename T>
TT_INLINE const T* row_gradient(const PlanView& plan, const GradView<T>& grad, int64_t u,
                                int64_t dim, T* scratch) {
  constexpr int64_t kAhead = 8;
  const int64_t begin = plan.row_starts[u], end = plan.row_starts[u + 1];
  if (end - begin == 1 && !grad.scale) return grad.grad_output + grad.sorted_at[begin];
  for (int64_t s = begin; s < end; s++) {
    if (s + kAhead < end) prefetch(grad.grad_output + grad.sorted_at[s + kAhead], dim);
    const T* from = grad.grad_output + grad.sorted_at[s];
    const T scale = grad.scale ? grad.scale[plan.order[s]] : T(1);
    if (s == begin) {
      scaled<T, false>(from, scale, dim, scratch);
    } else {
      scaled<T, true>(from, scale, dim, scratch);
    }
  }
  return scratch;
}

// The weight's gradient of each index of unique row u: <row, its bag's gradient>.
template <typename T>
static void weight_gradients(const PlanView& plan, const GradView<T>& grad, int64_t u, const T* row,
                             int64_t dim) {
  for (int64_t s = plan.row_starts[u]; s < plan.row_starts[u + 1]; s++) {
    const int64_t i = plan.order[s];
    const T* from = grad.grad_output + grad.sorted_at[s];
    T sum;
    dot_block<T, 1, 1, false>(row, dim, from, dim, dim, &sum, 1);
    grad.grad_weights[i] = grad.weight_scale ? grad.weight_scale[i] * sum : sum;
  }
}

}  // namespace torchrec_tt::TT_ISA
