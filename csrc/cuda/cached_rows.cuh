// Where cached rows lie: a unique row past those of the cores has its table's cached_key + its slot.
#pragma once

#include "prefix_batch.cuh"

namespace torchrec_tt::cuda {

// The last table whose slots begin at or before `key`; a table without a cache has none.
__device__ inline int table_of_slot(const Call& call, int64_t key) {
  int low = 0, high = call.num_tables - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (call.tables[middle].table.cached_key <= key) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// The table of unique row u.
__device__ inline int table_of_row(const Call& call, int u) {
  const int64_t key = call.plan.row_keys[u];
  return u < call.plan.counts[1] ? table_of(call, key) : table_of_slot(call, key);
}

// A unique row: an element of the computed rows, or ~ an element of its table's cached rows. Other
// caches than the plan's may lack the slot: kNoRow, which is read as NaN.
constexpr int64_t kNoRow = INT64_MIN;

__device__ inline int64_t place_of_row(const PlanView& plan, int u, int64_t ld_rows,
                                       int64_t cached_key, int64_t num_slots, int dim) {
  if (u < plan.counts[1]) return u * ld_rows;
  const int64_t slot = plan.row_keys[u] - cached_key;
  return slot >= 0 && slot < num_slots ? ~(slot * dim) : kNoRow;
}

// Element `column` of the row at a place.
__device__ inline float row_element(const float* rows, const void* cached_rows, Storage storage,
                                    int64_t place, int column) {
  if (place >= 0) return rows[place + column];
  return place == kNoRow ? __uint_as_float(0x7fc00000u)
                         : load_element(cached_rows, storage, ~place + column);
}

}  // namespace torchrec_tt::cuda
