// Sums of the terms that a deterministic backward leaves, in an order that nothing changes.
#pragma once

#include "backward.cuh"

namespace torchrec_tt::cuda {

// Targets of deterministic sums, and the memory for the terms of a turn.
struct OrderedSums {
  OrderedTerms terms{};
  int64_t num_targets = 0;
  uint32_t* sorted_targets = nullptr;  // [2 * num_rows]
  int32_t *places = nullptr, *sorted_places = nullptr;
  void* temporary = nullptr;
  size_t temporary_bytes = 0;

  // Numbers the tables' targets; rows_at_once rows a turn, 0: as many as kTermBytes hold.
  OrderedSums(std::vector<CallTable>& tables, int64_t num_indices, int64_t rows_at_once,
              Workspace& workspace);
};

// Before the terms of a turn are left, and after.
void launch_clear_terms(const OrderedSums& sums, cudaStream_t stream);
void launch_sum_terms(const OrderedSums& sums, const CallMemory& memory, const BackwardCall& b,
                      cudaStream_t stream);

}  // namespace torchrec_tt::cuda
