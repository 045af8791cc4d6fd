// How hot rows are, counted on the device as csrc/cpu/row_counter.cpp counts them: hits in their slots,
// misses in their bucket's cells, one after another in the order of the plan, whatever the schedule.
#include "../row_counter.h"

#include "call_memory.h"
#include "sort.h"

namespace torchrec_tt::cuda {
namespace {

struct CountedTable {
  RowCounter to;
  int64_t key_base, padded_rows, m_head, m_mid, m_last;
  int64_t cached_key;
  int64_t first_bucket;  // among those of all tables

  __device__ int64_t row_of_key(int64_t key) const {
    const int64_t local = key - key_base, prefix = local / m_last, mid = prefix / m_head;
    return ((prefix - mid * m_head) * m_mid + mid) * m_last + (local - prefix * m_last);
  }
};

struct Counted {
  const CountedTable* tables;  // [num_tables]
  int num_tables;
  PlanView plan;
  uint32_t num_buckets;  // of all tables: no row's bucket

  // The last table whose keys, or slots, begin at or before `key`.
  __device__ int table_of(int64_t key, int64_t CountedTable::*begin) const {
    int low = 0, high = num_tables - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (tables[middle].*begin <= key) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

__device__ float lookups_of(const PlanView& plan, int64_t u) {
  return static_cast<float>(plan.row_starts[u + 1] - plan.row_starts[u]);
}

// A thread per unique row: counts a cached one in its slot, which no other row has, and gives all the
// numbers that sort misses by bucket. 8 bytes an index, 12 a row, 8 a cached one.
__global__ void __launch_bounds__(kThreads, kManyBlocks)
    count_hits(Counted c, uint32_t* __restrict__ buckets,  // [N]
               int32_t* __restrict__ rows) {               // [N]
  const int64_t u = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (u >= c.plan.num_indices) return;
  uint32_t bucket = c.num_buckets;
  const int64_t key = u < c.plan.counts[0] ? c.plan.row_keys[u] : 0;
  if (u < c.plan.counts[1]) {
    const CountedTable& t = c.tables[c.table_of(key, &CountedTable::key_base)];
    if (t.to.num_slots > 0) {
      bucket = static_cast<uint32_t>(
          t.first_bucket + first_cell(t.row_of_key(key), t.to.num_buckets) / kCells);
    }
  } else if (u < c.plan.counts[0]) {
    const CountedTable& t = c.tables[c.table_of(key, &CountedTable::cached_key)];
    const int64_t slot = key - t.cached_key;
    if (slot < t.to.num_slots) {
      float& heat = t.to.heats[slot];
      heat = t.to.clock > 0 ? t.to.clock : heat + lookups_of(c.plan, u);
    }
  }
  buckets[u] = bucket;
  rows[u] = static_cast<int32_t>(u);
}

// A thread per sorted row; that of a bucket's first row counts all of them.
__global__ void __launch_bounds__(kThreads, kManyBlocks)
    count_misses(Counted c, const uint32_t* __restrict__ buckets,  // [N] sorted
                 const int32_t* __restrict__ rows) {               // [N]
  int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= c.plan.num_indices) return;
  const uint32_t bucket = buckets[i];
  if (bucket == c.num_buckets || (i > 0 && buckets[i - 1] == bucket)) return;
  const CountedTable& t =
      c.tables[c.table_of(c.plan.row_keys[rows[i]], &CountedTable::key_base)];
  const int64_t first = (int64_t{bucket} - t.first_bucket) * kCells;
  for (; i < c.plan.num_indices && buckets[i] == bucket; i++) {
    const int64_t id = t.row_of_key(c.plan.row_keys[rows[i]]);
    if (t.to.clock > 0) {
      note_lookup(id, t.to.clock, t.to.ids + first, t.to.counter_heats + first);
    } else {
      count_lookups(id, lookups_of(c.plan, rows[i]), t.to.ids + first, t.to.counter_heats + first);
    }
  }
}

// The first unique row of [begin, end) whose key is `key` or more.
__device__ int64_t row_at(const PlanView& plan, int64_t begin, int64_t end, int64_t key) {
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (plan.row_keys[middle] < key) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// A thread per table.
__global__ void __launch_bounds__(kThreads) count_statistics(Counted c) {
  for (int i = threadIdx.x; i < c.num_tables; i += kThreads) {
    const CountedTable& t = c.tables[i];
    if (t.to.num_slots == 0) continue;
    const PlanView& plan = c.plan;
    const int64_t num_tt = plan.counts[1], num_rows = plan.counts[0];
    const int64_t miss = row_at(plan, 0, num_tt, t.key_base);
    const int64_t miss_end = row_at(plan, miss, num_tt, t.key_base + t.padded_rows);
    const int64_t hit = row_at(plan, num_tt, num_rows, t.cached_key);
    const int64_t hit_end = row_at(plan, hit, num_rows, t.cached_key + t.to.num_slots);
    t.to.statistics[0] += plan.row_starts[hit_end] - plan.row_starts[hit];
    t.to.statistics[1] += plan.row_starts[miss_end] - plan.row_starts[miss];
    t.to.statistics[2] += miss_end - miss;
  }
}

struct CountMemory {
  Workspace workspace;
  int64_t num_buckets = 0;
  CountedTable* tables;
  uint32_t *buckets, *sorted_buckets;
  int32_t *rows, *sorted_rows;
  void* temporary;
  size_t temporary_bytes = 0;

  CountMemory(const PlanView& plan, const std::vector<RowCounter>& counters, void* base)
      : workspace{static_cast<char*>(base)} {
    const int64_t n = plan.num_indices;
    for (const RowCounter& counter : counters) num_buckets += counter.num_buckets;
    TT_CHECK(num_buckets <= UINT32_MAX, "counter_ids must have less than 2^32 buckets together, got ",
             num_buckets);
    tables = workspace.take<CountedTable>(static_cast<int64_t>(counters.size()));
    buckets = workspace.take<uint32_t>(n);
    sorted_buckets = workspace.take<uint32_t>(n);
    rows = workspace.take<int32_t>(n);
    sorted_rows = workspace.take<int32_t>(n);
    if (n > 0) sort(nullptr, n, nullptr);
    temporary = workspace.take<char>(static_cast<int64_t>(temporary_bytes));
  }

  void sort(void* storage, int64_t n, cudaStream_t stream) {
    sort_pairs(storage, temporary_bytes, buckets, sorted_buckets, rows, sorted_rows, n,
               bits_of(num_buckets), stream);
  }
};

}  // namespace

int64_t count_workspace_bytes(const PlanView& plan, const std::vector<RowCounter>& counters) {
  return CountMemory(plan, counters, nullptr).workspace.bytes;
}

void launch_count(const PlanView& plan, const std::vector<TTShape>& tables,
                  const std::vector<RowCounter>& counters, void* workspace, cudaStream_t stream) {
  CountMemory memory(plan, counters, workspace);
  const int64_t n = plan.num_indices;
  if (n == 0) return;
  std::vector<CountedTable> counted;
  int64_t cached_key = tables.back().key_base + tables.back().padded_rows(), first_bucket = 0;
  for (size_t t = 0; t < tables.size(); t++) {
    const TTShape& shape = tables[t];
    counted.push_back({counters[t], shape.key_base, shape.padded_rows(), shape.m_head(),
                       shape.m_mid(), shape.m_last(), cached_key, first_bucket});
    cached_key += counters[t].num_slots;
    first_bucket += counters[t].num_buckets;
  }
  launch_upload(counted.data(), static_cast<int64_t>(counted.size() * sizeof(CountedTable)),
                memory.tables, stream);
  const Counted c{memory.tables, static_cast<int>(tables.size()), plan,
                  static_cast<uint32_t>(memory.num_buckets)};
  const unsigned blocks = static_cast<unsigned>((n + kThreads - 1) / kThreads);
  TT_LAUNCH(count_hits, blocks, kThreads, 0, stream, c, memory.buckets, memory.rows);
  memory.sort(memory.temporary, n, stream);
  TT_LAUNCH(count_misses, blocks, kThreads, 0, stream, c, memory.sorted_buckets, memory.sorted_rows);
  TT_LAUNCH(count_statistics, 1, kThreads, 0, stream, c);
  check_cuda(cudaGetLastError());
}

}  // namespace torchrec_tt::cuda
