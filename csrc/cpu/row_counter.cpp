// How hot rows are: lookups of cached rows are counted in their slots, those of others in a sketch.
//
// Per table with a cache of C slots (numel 0: no cache):
//   heats          [C] float32      of the row in each slot
//   counter_ids    [8 buckets] int64, counter_heats [8 buckets] float32: the sketch (row_counter.h)
//   statistics     [3 or more] int64: hits, misses, unique misses are counted up
// lfu: a heat is a number of lookups; lru: the clock of the last one.
#include <algorithm>
#include <vector>

#include "../row_counter.h"
#include "../stable.h"
#include "../tt_shape.h"

namespace torchrec_tt {
namespace {

constexpr int64_t kRowsAhead = 64;  // whose buckets are asked of memory together

struct Counts {
  float* heats;
  int64_t* ids;
  float* counter_heats;
  int64_t num_buckets;
  int64_t* statistics;
  float clock;  // 0 for lfu
};

struct PlanRows {
  const int64_t* keys;    // [U]
  const int32_t* starts;  // [U + 1]
  int64_t lookups(int64_t u) const { return starts[u + 1] - starts[u]; }
};

int64_t row_of_key(const TTShape& table, int64_t key) {
  const uint64_t local = key - table.key_base, m_last = table.m_last(), m_head = table.m_head();
  const uint64_t prefix = local / m_last, mid = prefix / m_head;
  return ((prefix - mid * m_head) * table.m_mid() + mid) * m_last + (local - prefix * m_last);
}

void count_hits(const Counts& to, const PlanRows& rows, int64_t begin, int64_t end, int64_t first_key) {
  for (int64_t u = begin; u < end; u++) {
    float& heat = to.heats[rows.keys[u] - first_key];
    heat = to.clock > 0 ? to.clock : heat + static_cast<float>(rows.lookups(u));
  }
  to.statistics[0] += rows.starts[end] - rows.starts[begin];
}

void count_misses(const Counts& to, const PlanRows& rows, int64_t begin, int64_t end,
                  const TTShape& table) {
  int64_t ids[kRowsAhead], cells[kRowsAhead];
  for (int64_t first = begin; first < end; first += kRowsAhead) {
    const int64_t n = std::min(kRowsAhead, end - first);
    for (int64_t i = 0; i < n; i++) {
      ids[i] = row_of_key(table, rows.keys[first + i]);
      cells[i] = first_cell(ids[i], to.num_buckets);
      __builtin_prefetch(to.ids + cells[i], 1);
      __builtin_prefetch(to.counter_heats + cells[i], 1);
    }
    for (int64_t i = 0; i < n; i++) {
      if (to.clock > 0) {
        note_lookup(ids[i], to.clock, to.ids + cells[i], to.counter_heats + cells[i]);
      } else {
        count_lookups(ids[i], static_cast<float>(rows.lookups(first + i)), to.ids + cells[i],
                      to.counter_heats + cells[i]);
      }
    }
  }
  to.statistics[1] += rows.starts[end] - rows.starts[begin];
  to.statistics[2] += end - begin;
}

template <typename T>
T* data_of(const Tensor& tensor, ScalarType type, int64_t size, const char* name, size_t t) {
  TT_CHECK(tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == type &&
               tensor.numel() >= size,
           name, " must be contiguous, on the CPU, ", type, " and of ", size, " elements for table ", t,
           ", got ", tensor.numel(), " of ", tensor.scalar_type());
  return static_cast<T*>(tensor.mutable_data_ptr());
}

void count_rows(const std::vector<Tensor>& plan, const std::vector<int64_t>& tables_flat,
                const std::vector<Tensor>& heats, const std::vector<Tensor>& counter_ids,
                const std::vector<Tensor>& counter_heats, const std::vector<Tensor>& statistics,
                const std::vector<int64_t>& clocks) {
  const auto tables = decode_tables(tables_flat);
  TT_CHECK(plan.size() == 6, "plan must hold 6 tensors, got ", plan.size());
  for (size_t size : {heats.size(), counter_ids.size(), counter_heats.size(), statistics.size(),
                      clocks.size()}) {
    TT_CHECK(size == tables.size(), "heats, counter_ids, counter_heats, statistics and clocks must have ",
             tables.size(), " entries, one per table, got ", size);
  }
  const PlanRows rows{static_cast<const int64_t*>(plan[2].const_data_ptr()),
                      static_cast<const int32_t*>(plan[3].const_data_ptr())};
  const auto* counts = static_cast<const int64_t*>(plan[5].const_data_ptr());
  const int64_t *cores_end = rows.keys + counts[1], *cached_end = rows.keys + counts[0];
  int64_t cached_key = tables.back().key_base + tables.back().padded_rows();
  for (size_t t = 0; t < tables.size(); t++) {
    const int64_t num_slots = heats[t].numel(), num_cells = counter_ids[t].numel();
    if (num_slots == 0) continue;
    TT_CHECK(num_cells > 0 && num_cells % kCells == 0, "counter_ids must have a multiple of ", kCells,
             " elements, got ", num_cells, " for table ", t);
    const Counts to{data_of<float>(heats[t], ScalarType::Float, num_slots, "heats", t),
                    data_of<int64_t>(counter_ids[t], ScalarType::Long, num_cells, "counter_ids", t),
                    data_of<float>(counter_heats[t], ScalarType::Float, num_cells, "counter_heats", t),
                    num_cells / kCells,
                    data_of<int64_t>(statistics[t], ScalarType::Long, 3, "statistics", t),
                    static_cast<float>(clocks[t])};
    const auto place = [&](const int64_t* from, const int64_t* to, int64_t key) {
      return std::lower_bound(from, to, key) - rows.keys;
    };
    count_hits(to, rows, place(cores_end, cached_end, cached_key),
               place(cores_end, cached_end, cached_key + num_slots), cached_key);
    const int64_t key = tables[t].key_base;
    count_misses(to, rows, place(rows.keys, cores_end, key),
                 place(rows.keys, cores_end, key + tables[t].padded_rows()), tables[t]);
    cached_key += num_slots;
  }
}

}  // namespace
}  // namespace torchrec_tt

STABLE_TORCH_LIBRARY_IMPL(torchrec_tt, CPU, m) {
  m.impl("count_rows", TORCH_BOX(&torchrec_tt::count_rows));
}
