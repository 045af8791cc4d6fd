// Cached rows: read in place by the pooling, and stepped on their summed gradients.
#pragma once

#include "prefix_batch.h"
#include "row_gradients.h"
#include "update.h"

namespace torchrec_tt::TT_ISA {

// Unique row u, in place; one of 16 bits is widened into `scratch`.
template <typename T>
TT_INLINE const T* read_row(const RowsView<T>& rows, const PlanView& plan, int64_t u, int64_t dim,
                            T* scratch) {
  if (u < rows.end_row) return rows.computed + (u - rows.first_row) * dim;
  return elements(rows.cached, rows.storage, (plan.row_keys[u] - rows.cached_key) * dim, dim,
                  scratch);
}

TT_INLINE void prefetch_bytes(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i);
}

template <typename T>
TT_INLINE int64_t row_bytes(Storage storage, int64_t dim) {
  return dim * static_cast<int64_t>(storage == Storage::kNative ? sizeof(T) : 2);
}

template <typename T>
TT_INLINE void prefetch_row(const RowsView<T>& rows, const PlanView& plan, int64_t u, int64_t dim) {
  if (u < rows.end_row) return prefetch(rows.computed + (u - rows.first_row) * dim, dim);
  const int64_t bytes = row_bytes<T>(rows.storage, dim);
  const int64_t slot = plan.row_keys[u] - rows.cached_key;
  prefetch_bytes(static_cast<const char*>(rows.cached) + slot * bytes, bytes);
}

template <typename T>
static void cached_weight_gradients(const RowsView<T>& rows, int64_t dim, const PlanView& plan,
                                    const GradView<T>& grad, int64_t begin, int64_t end,
                                    T* scratch) {
  for (int64_t u = begin; u < end; u++) {
    weight_gradients(plan, grad, u, read_row(rows, plan, u, dim, scratch), dim);
  }
}

// Asks for what the step of cached unique row u, in `slot`, reads and writes.
template <typename T>
TT_INLINE void prefetch_step(const CoreUpdate<T>& step, int64_t slot, int64_t dim,
                             const PlanView& plan, const GradView<T>& grad, int64_t u) {
  const int64_t bytes = row_bytes<T>(step.storage, dim);
  prefetch_bytes(static_cast<const char*>(step.weight) + slot * bytes, bytes);
  if (step.optimizer == Optimizer::kRowwiseAdagrad) {
    __builtin_prefetch(step.moment1 + slot);
  } else if (step.moment1) {
    prefetch(step.moment1 + slot * dim, dim);
    if (step.moment2) prefetch(step.moment2 + slot * dim, dim);
  }
  const int64_t begin = plan.row_starts[u], past = plan.row_starts[u + 1];
  for (int64_t s = begin; s < past && s < begin + 4; s++) {
    prefetch(grad.grad_output + grad.sorted_at[s], dim);
  }
}

template <typename T>
static void step_rows(const CoreUpdate<T>& step, const CachedSlots& slots, int64_t dim,
                      const PlanView& plan, const GradView<T>& grad, int64_t begin, int64_t end,
                      T* scratch) {
  constexpr int64_t kAhead = 8;
  const auto slot_of = [&](int64_t u) { return plan.row_keys[u] - slots.key_base; };
  CoreUpdate<T> row_step = step;
  for (int64_t u = begin; u < end; u++) {
    if (u + kAhead < end) prefetch_step(step, slot_of(u + kAhead), dim, plan, grad, u + kAhead);
    const int64_t slot = slot_of(u);
    // A row is rounded alike in whatever slot it lies.
    if (step.is_stochastic) row_step.rounding_shift = (slots.ids[slot] - slot) * dim;
    update(row_step, slot * dim, row_gradient(plan, grad, u, dim, scratch), 1, dim, dim);
  }
}

}  // namespace torchrec_tt::TT_ISA
