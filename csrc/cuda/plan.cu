// The plan of a batch on the device: keys of the ids, one radix sort over all tables, a scan that
// numbers rows and prefixes, and what follows from the numbers. What a plan holds: cpu/plan.cpp.
// Keys are of 4 bytes where those of all tables fit, as they are sorted in half the time.
#include "plan.h"

#include <cstring>
#include <type_traits>

#include "../row_tags.h"
#include "fault.cuh"
#include "launchers.h"
#include "sort.h"

namespace torchrec_tt::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kNowhere = INT64_MAX;
constexpr int64_t kNoKey = INT64_MAX;  // of row_keys past the last row

// A table's part of the keys.
struct KeyTable {
  int64_t num_rows, row_offset, key_base, padded_rows;
  int64_t m_head, m_mid, m_last;
  CacheTags cache;
};

struct Keys {
  const KeyTable* tables;       // [T]
  const int64_t* table_of;      // [F]
  int num_tables, num_features;
  int64_t batch_size, num_indices;
  int64_t cached_key;  // the first of cached rows
  bool is_fatal;
};

// First places in indices or offsets, or kNowhere, and how many ids were out of range.
struct Found {
  unsigned long long bad_offset, fatal_id, bad_id, num_bad;
};

// The last table whose keys begin at or before `key`.
__device__ inline int table_of_key(const Keys& k, int64_t key) {
  int low = 0, high = k.num_tables;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (k.tables[middle].key_base <= key ? low : high) = middle;
  }
  return low;
}

// The feature whose bags hold index i; some feature, where offsets do not ascend.
template <typename Offset>
__device__ int feature_of(const Keys& k, const Offset* offsets, int64_t i) {
  int low = 0, high = k.num_features;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (static_cast<int64_t>(offsets[middle * k.batch_size]) <= i ? low : high) = middle;
  }
  return low;
}

__device__ inline int64_t key_of(const KeyTable& t, int64_t id) {
  const int64_t slot = find_slot(id + t.row_offset, t.cache.ids, t.cache.num_slots / kWays);
  if (slot >= 0) return t.cache.key_base + slot;
  // A shard without rows has none to read: any of the table's does until the fault is raised.
  const int64_t row = min(id + t.row_offset, t.padded_rows - 1);
  const int64_t prefix = row / t.m_last;
  const int64_t head = prefix / t.m_mid, mid = prefix - head * t.m_mid;
  return t.key_base + (mid * t.m_head + head) * t.m_last + (row - prefix * t.m_last);
}

__device__ inline bool is_in(const KeyTable& t, int64_t id) { return id >= 0 && id < t.num_rows; }

// A thread per index: its key, and its place for the sort. 12 to 20 bytes per index, and with a cache
// two sets of tags, 64 bytes each.
template <typename Index, typename Offset, typename Key>
__global__ void __launch_bounds__(kThreads)
    write_keys(Keys k,
               const Index* __restrict__ indices,   // [N]
               const Offset* __restrict__ offsets,  // [F * B + 1]
               // outputs
               Key* __restrict__ keys,  // [N]
               int32_t* __restrict__ places,  // [N]
               Found* found) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= k.num_indices) return;
  const KeyTable& table = k.tables[k.table_of[feature_of(k, offsets, i)]];
  int64_t id = static_cast<int64_t>(indices[i]);
  if (!is_in(table, id)) {
    const auto at = static_cast<unsigned long long>(i);
    atomicMin(k.is_fatal || table.num_rows == 0 ? &found->fatal_id : &found->bad_id, at);
    atomicAdd(&found->num_bad, 1ULL);
    id = 0;
  }
  keys[i] = static_cast<Key>(key_of(table, id));
  places[i] = static_cast<int32_t>(i);
}

template <typename Offset>
__device__ bool fits(const Keys& k, const Offset* offsets, int64_t i, int64_t last) {
  if (i == 0 && offsets[0] != 0) return false;
  if (i > 0 && offsets[i] < offsets[i - 1]) return false;
  return i < last || offsets[i] == static_cast<Offset>(k.num_indices);
}

// A thread per offset.
template <typename Offset>
__global__ void __launch_bounds__(kThreads)
    check_offsets(Keys k, const Offset* __restrict__ offsets, Found* found) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t last = k.num_features * k.batch_size;
  if (i <= last && !fits(k, offsets, i, last)) {
    atomicMin(&found->bad_offset, static_cast<unsigned long long>(i));
  }
}

// A thread per sorted key: 1 where a new row begins, and 2^32 more where a new prefix does. The sums
// of both stay below 2^31, as N does. Cached rows have no prefix. 12 to 16 bytes per index.
template <typename Key>
__global__ void __launch_bounds__(kThreads)
    mark_rows(Keys k, const Key* __restrict__ keys,  // [N] sorted
              uint64_t* __restrict__ marks) {         // [N]
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= k.num_indices) return;
  const int64_t key = static_cast<int64_t>(keys[i]);
  const int64_t before = i > 0 ? static_cast<int64_t>(keys[i - 1]) : -1;
  if (key >= k.cached_key) {
    marks[i] = before < key ? 1 : 0;
    return;
  }
  const KeyTable& table = k.tables[table_of_key(k, key)];
  const int64_t in_table = key - table.key_base;
  const int64_t prefix_begin = table.key_base + in_table / table.m_last * table.m_last;
  marks[i] = (before < prefix_begin ? uint64_t{1} << 32 : 0) | (before < key ? 1 : 0);
}

struct PlanTensors {
  int32_t* order;          // [N]
  int32_t* inverse;        // [N]
  int64_t* row_keys;       // [N]
  int32_t* row_starts;     // [N + 1]
  int32_t* prefix_starts;  // [N + 1]
  int64_t* counts;         // [4]
};

// How many rows begin before the first sorted key that is `cached_key` or more.
template <typename Key>
__device__ int64_t count_rows_below(int64_t cached_key, int64_t num_indices, const Key* keys,
                                    const uint64_t* marks) {
  int64_t low = 0, high = num_indices;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (static_cast<int64_t>(keys[middle]) < cached_key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low > 0 ? static_cast<int64_t>(marks[low - 1] & 0xffffffff) : 0;
}

// A thread per sorted position, and one past the last: its row's number to its index, its row's and
// prefix's begin if they begin there, and what lies past all rows and prefixes. 36 to 40 bytes per index.
template <typename Key>
__global__ void __launch_bounds__(kThreads)
    write_rows(int64_t num_indices, int64_t cached_key,
               const Key* __restrict__ keys,        // [N] sorted
               const uint64_t* __restrict__ marks,  // [N] summed up
               PlanTensors plan) {
  TT_SHARED(int64_t, num_tt_rows, 1);
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t n = num_indices;
  if (threadIdx.x == 0) *num_tt_rows = count_rows_below(cached_key, n, keys, marks);
  __syncthreads();
  if (i > n) return;
  const uint64_t total = n > 0 ? marks[n - 1] : 0;
  const int64_t num_rows = static_cast<int64_t>(total & 0xffffffff);
  const int64_t num_prefixes = static_cast<int64_t>(total >> 32);
  if (i < n) {
    const uint64_t before = i > 0 ? marks[i - 1] : 0;
    const int32_t row = static_cast<int32_t>(marks[i] & 0xffffffff) - 1;
    plan.inverse[plan.order[i]] = row;
    if (marks[i] != before) {
      plan.row_keys[row] = static_cast<int64_t>(keys[i]);
      plan.row_starts[row] = static_cast<int32_t>(i);
    }
    if (marks[i] >> 32 != before >> 32) plan.prefix_starts[(marks[i] >> 32) - 1] = row;
    if (i >= num_rows) plan.row_keys[i] = kNoKey;
  }
  if (i >= num_rows) plan.row_starts[i] = static_cast<int32_t>(n);
  if (i >= num_prefixes) plan.prefix_starts[i] = static_cast<int32_t>(*num_tt_rows);
  if (i == n) {
    plan.counts[0] = num_rows;
    plan.counts[1] = *num_tt_rows;
    plan.counts[2] = num_prefixes;
  }
}

template <typename Offset>
__device__ FaultRecord offset_fault(const Keys& k, const Offset* offsets, int64_t at) {
  const int64_t value = static_cast<int64_t>(offsets[at]);
  const int64_t before = at > 0 ? static_cast<int64_t>(offsets[at - 1]) : 0;
  if (at == 0 && value != 0) {
    return {static_cast<int64_t>(Fault::kOffsetsStart), at, 0, 0, value, 0};
  }
  if (value < before) {
    return {static_cast<int64_t>(Fault::kOffsetsDecrease), at, 0, 0, value, before};
  }
  return {static_cast<int64_t>(Fault::kOffsetsEnd), at, 0, 0, value, k.num_indices};
}

template <typename Index, typename Offset>
__device__ FaultRecord id_fault(const Keys& k, const Index* indices, const Offset* offsets,
                                int64_t at) {
  const int64_t feature = feature_of(k, offsets, at), table = k.table_of[feature];
  const int64_t value = static_cast<int64_t>(indices[at]), limit = k.tables[table].num_rows;
  return {static_cast<int64_t>(Fault::kBadId), at, table, feature, value, limit};
}

// One thread: the number of ids out of range, and the first fault for the host, offsets before ids.
// With wrong offsets the plan is one of no rows, and says so with a count of -1.
template <typename Index, typename Offset>
__global__ void report(Keys k, const Index* indices, const Offset* offsets, const Found* found,
                       int64_t* counts, FaultRecord* faults, FaultRecord* warnings) {
  constexpr auto kNone = static_cast<unsigned long long>(kNowhere);
  counts[3] = static_cast<int64_t>(found->num_bad);
  if (found->bad_offset != kNone) {
    counts[0] = counts[1] = counts[2] = 0;
    counts[3] = -1;
    record(offset_fault(k, offsets, static_cast<int64_t>(found->bad_offset)), faults);
    return;
  }
  if (found->fatal_id != kNone) {
    record(id_fault(k, indices, offsets, static_cast<int64_t>(found->fatal_id)), faults);
  }
  if (found->bad_id != kNone) {
    record(id_fault(k, indices, offsets, static_cast<int64_t>(found->bad_id)), warnings);
  }
}

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

int bits_of_keys(const PlanCall& call) {
  const CacheTags& last = call.caches.back();
  return bits_of(static_cast<uint64_t>(last.key_base + last.num_slots - 1));
}

// The pieces of the working memory, what the host writes first; without memory just their size.
template <typename Key>
struct Workspace {
  int64_t bytes = 0;
  char* from;
  KeyTable* tables;
  int64_t* table_of;
  Found* found;
  Key *keys, *sorted_keys;
  uint64_t* marks;
  int32_t* places;
  void* temporary;
  size_t temporary_bytes = 0;

  Workspace(const PlanCall& call, void* memory) : from(static_cast<char*>(memory)) {
    const int64_t n = call.num_indices;
    tables = take<KeyTable>(call.tables.size());
    table_of = take<int64_t>(call.feature_tables.size());
    found = take<Found>(1);
    keys = take<Key>(n);
    sorted_keys = take<Key>(n);
    places = take<int32_t>(n);
    if constexpr (std::is_same_v<Key, uint64_t>) {
      marks = keys;  // the keys are sorted by then
    } else {
      marks = take<uint64_t>(n);
    }
    size_t scan_bytes = 0;
    if (n > 0) {
      sort_pairs(nullptr, temporary_bytes, keys, sorted_keys, places, call.order, n,
                 bits_of_keys(call), nullptr);
      sum_up(nullptr, scan_bytes, marks, n, nullptr);
    }
    temporary_bytes = temporary_bytes < scan_bytes ? scan_bytes : temporary_bytes;
    temporary = take<char>(static_cast<int64_t>(temporary_bytes));
  }

  template <typename T>
  T* take(int64_t count) {
    T* piece = from ? reinterpret_cast<T*>(from + bytes) : nullptr;
    bytes += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return piece;
  }
};

template <typename Index, typename Offset, typename Key>
void launch(const PlanCall& call, void* workspace, cudaStream_t stream) {
  Workspace<Key> w(call, workspace);
  const int64_t n = call.num_indices;
  std::vector<KeyTable> tables;
  for (size_t t = 0; t < call.tables.size(); t++) {
    const TTShape& shape = call.tables[t];
    tables.push_back({shape.num_rows, shape.row_offset, shape.key_base, shape.padded_rows(),
                      shape.m_head(), shape.m_mid(), shape.m_last(), call.caches[t]});
  }
  const Found none{kNowhere, kNowhere, kNowhere, 0};
  std::vector<char> head(reinterpret_cast<char*>(w.keys) - w.from);
  const auto put = [&](const auto* from, size_t count, const void* to) {
    std::memcpy(head.data() + (static_cast<const char*>(to) - w.from), from, count * sizeof(*from));
  };
  put(tables.data(), tables.size(), w.tables);
  put(call.feature_tables.data(), call.feature_tables.size(), w.table_of);
  put(&none, 1, w.found);
  launch_upload(head.data(), static_cast<int64_t>(head.size()), w.from, stream);
  const Keys keys{w.tables,
                  w.table_of,
                  static_cast<int>(tables.size()),
                  static_cast<int>(call.feature_tables.size()),
                  call.batch_size,
                  n,
                  call.caches.front().key_base,
                  call.mode == CheckMode::kFatal};
  const auto* indices = static_cast<const Index*>(call.indices);
  const auto* offsets = static_cast<const Offset*>(call.offsets);
  const int64_t num_offsets = keys.num_features * keys.batch_size + 1;
  TT_LAUNCH((check_offsets<Offset>), blocks_for(num_offsets), kThreads, 0, stream, keys, offsets,
            w.found);
  if (n > 0) {
    TT_LAUNCH((write_keys<Index, Offset, Key>), blocks_for(n), kThreads, 0, stream, keys, indices,
              offsets, w.keys, w.places, w.found);
    sort_pairs(w.temporary, w.temporary_bytes, w.keys, w.sorted_keys, w.places, call.order, n,
               bits_of_keys(call), stream);
    TT_LAUNCH(mark_rows<Key>, blocks_for(n), kThreads, 0, stream, keys, w.sorted_keys, w.marks);
    sum_up(w.temporary, w.temporary_bytes, w.marks, n, stream);
  }
  const PlanTensors plan{call.order,      call.inverse,       call.row_keys,
                         call.row_starts, call.prefix_starts, call.counts};
  TT_LAUNCH(write_rows<Key>, blocks_for(n + 1), kThreads, 0, stream, n, keys.cached_key, w.sorted_keys,
            w.marks, plan);
  TT_LAUNCH((report<Index, Offset>), 1, 1, 0, stream, keys, indices, offsets, w.found,
            call.counts, call.faults, call.warnings);
}

bool has_short_keys(const PlanCall& call) { return bits_of_keys(call) <= 32; }

template <typename Index, typename Offset>
void launch_for(const PlanCall& call, void* workspace, cudaStream_t stream) {
  (has_short_keys(call) ? launch<Index, Offset, uint32_t> : launch<Index, Offset, uint64_t>)(
      call, workspace, stream);
}

}  // namespace

int64_t plan_workspace_bytes(const PlanCall& call) {
  return has_short_keys(call) ? Workspace<uint32_t>(call, nullptr).bytes
                              : Workspace<uint64_t>(call, nullptr).bytes;
}

void launch_plan(const PlanCall& call, void* workspace, cudaStream_t stream) {
  const bool long_offsets = call.has_long_offsets;
  const auto launch = call.has_long_indices
                          ? (long_offsets ? launch_for<int64_t, int64_t> : launch_for<int64_t, int32_t>)
                          : (long_offsets ? launch_for<int32_t, int64_t> : launch_for<int32_t, int32_t>);
  launch(call, workspace, stream);
}

cudaError_t probe_device() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, write_rows<uint32_t>);
}

}  // namespace torchrec_tt::cuda
