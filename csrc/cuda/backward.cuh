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

struct Prefixes {
  int begin, end;
};

// The first of some prefixes whose rows begin at or after `key`; the block looks 256 through at once.
__device__ inline int prefix_at(const PlanView& plan, int64_t key, Prefixes from) {
  int count = kThreads;
  while (count == kThreads) {
    const int i = threadIdx.x;
    count = __syncthreads_count(i < from.end - from.begin && first_key(plan, from.begin + i) < key);
    from.begin += count;
  }
  return from.begin;
}

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

__device__ inline Prefixes window_of(const Prefixes& all, int64_t number, int64_t size) {
  const int64_t begin = all.begin + number * size, end = all.end;
  return {static_cast<int>(min(begin, end)), static_cast<int>(min(begin + size, end))};
}

// Where the keys of a prefix's group end; a table without mid has no groups, there it is the prefix's.
__device__ inline int64_t end_of_group(const Call& call, int prefix) {
  const int64_t key = first_key(call.plan, prefix);
  const Table& t = call.tables[table_of(call, key)].table;
  const int64_t size = t.has_mid ? t.m_head * t.m_last : t.m_last;
  return t.key_base + ((key - t.key_base) / size + 1) * size;
}

// The groups that begin in a window, whole; `all` begins and ends some.
__device__ inline Prefixes whole_groups(const Call& call, const Prefixes& window, const Prefixes& all) {
  Prefixes groups = window;
  if (window.begin > all.begin) {
    groups.begin = prefix_at(call.plan, end_of_group(call, window.begin - 1), window);
  }
  if (groups.begin < window.end && window.end < all.end) {
    groups.end = prefix_at(call.plan, end_of_group(call, window.end - 1), {window.end, all.end});
  }
  return groups;
}

}  // namespace torchrec_tt::cuda
