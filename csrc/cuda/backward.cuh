// What the kernel of the gradients is given, and where it leaves what it sums.
#pragma once

#include "prefix_batch.cuh"
#include "row_gradients.cuh"

namespace torchrec_tt::cuda {

// Deterministic sums. A job is then a whole group of prefixes, whose mid gradient its block owns;
// gradients of heads and last slices are left as terms, one a prefix and one a row, and summed per
// target in order (ordered_sums.cu). Rows are taken in turns, so that terms stay few.
struct OrderedTerms {
  int64_t num_jobs;
  int first_row, num_rows;  // of the turn
  int64_t ld;
  float* terms;       // [2 * num_rows, ld]: of rows, then of prefixes
  uint32_t* targets;  // [2 * num_rows]
};

constexpr int kHeadsOfJob = 8;  // a table without mid has no groups

struct BackwardCall {
  RowGradients row_grads;
  float* grad_heads;  // 4 cores, like Call::heads
  int32_t* touched;   // or null
  int is_ordered;
  OrderedTerms ordered;
};

// The prefixes of a job.
struct JobRange {
  int begin, end;
};

// The first prefix whose rows begin at or after `key`.
__device__ inline int prefix_at(const PlanView& plan, int64_t key, int num_prefixes) {
  int low = 0, high = num_prefixes;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (first_key(plan, middle) < key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
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

__device__ inline JobRange window_of(const Call& call, int64_t job, int num_prefixes) {
  const int64_t begin = min(job * call.prefixes_per_window, int64_t{num_prefixes});
  return {static_cast<int>(begin),
          static_cast<int>(min(begin + call.prefixes_per_window, int64_t{num_prefixes}))};
}

__device__ inline JobRange group_of(const Call& call, int64_t job, int num_prefixes,
                                    JobRange of_turn) {
  int low = 0, high = call.num_tables - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (call.tables[middle].table.first_job <= job) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const Table& t = call.tables[low].table;
  const int64_t own = job - t.first_job;
  const int64_t size = t.has_mid ? t.m_head * t.m_last : kHeadsOfJob * t.m_last;
  const int64_t key = t.key_base + own * size;
  const int64_t end = min(key + size, t.key_base + t.num_keys());
  return {max(prefix_at(call.plan, key, num_prefixes), of_turn.begin),
          min(prefix_at(call.plan, end, num_prefixes), of_turn.end)};
}

}  // namespace torchrec_tt::cuda
