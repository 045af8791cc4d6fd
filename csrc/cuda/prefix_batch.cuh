// Prefixes of one group (a mid digit) that a block takes together, and their products with its slice.
#pragma once

#include "call_memory.h"
#include "storage.cuh"
#include "tile_product.cuh"

namespace torchrec_tt::cuda {

// The last table whose keys begin at or before `key`.
__device__ inline int table_of(const Call& call, int64_t key) {
  int low = 0, high = call.num_tables - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (call.tables[middle].table.key_base <= key) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__device__ inline int64_t first_key(const PlanView& plan, int prefix) {
  return plan.row_keys[plan.prefix_starts[prefix]];
}

// How many prefixes a block takes at a time.
__device__ inline int window_size(const Call& call, int num_prefixes) {
  return max(kLeastWindow, min(num_prefixes / call.num_jobs, kMostWindow));
}

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

// Whether no group is much longer than a window: a block then takes whole ones, whose mid slices it
// loads and whose mid gradients it stores, once.
__device__ inline bool takes_groups(const Call& call, int num_prefixes) {
  return call.longest_group <= 2 * window_size(call, num_prefixes);
}

// Where the head of a digit lies: its slice of core 0, or with 4 cores its place among the products.
__device__ inline int64_t head_place(const Call& call, const Table& t, int64_t digit) {
  return t.num_cores == 4 ? call.head_slots[t.first_head_digit + digit] : digit;
}

// Shared by a block.
struct BatchState {
  CallTable table;
  int64_t head[kPrefixesAtOnce];       // their places
  int64_t first_key[kPrefixesAtOnce];  // of their rows, that of last digit 0
  int starts[kPrefixesAtOnce], ends[kPrefixesAtOnce];  // their unique rows
  int64_t last_digit[kRowsAtOnce];  // of the rows in hand
  int prefix_of_row[kRowsAtOnce];
};

// Block-uniform, a copy in every thread's registers.
struct PrefixBatch {
  int table = -1;
  int64_t group_begin = 0, group_end = 0, mid = 0;  // keys of the group, its digit
  bool is_first = false;                            // of its group
  int first = 0, count = 0;                         // prefixes [first, first + count)
};

// Takes the table's mid slice of the batch's group.
__device__ inline void load_mid(const PrefixBatch& batch, const BatchState& s, float* memory) {
  const Table& t = s.table.table;
  const BlockLayout& at = s.table.at;
  const void* core = t.cores[t.mid_core()];
  const int lane = threadIdx.x % 32, width = t.n_mid * t.rank;
  const int64_t slice = batch.mid * t.mid_size();
  for (int a = threadIdx.x / 32; a < at.k_head; a += kWarps) {
    for (int c = lane; c < t.n_mid * at.k_rank; c += 32) {
      const int y = c / at.k_rank, b = c % at.k_rank;
      const bool is_inside = a < t.r_head && b < t.rank;
      memory[at.mid + a * at.ld_mid + c] =
          is_inside ? load_element(core, t.storage, slice + a * width + y * t.rank + b) : 0.0f;
    }
  }
}

// Takes the table and the group of `key`, if they are others.
__device__ inline void enter_group(const Call& call, int64_t key, PrefixBatch& batch, BatchState& s,
                                   float* memory) {
  batch.is_first = key < batch.group_begin || key >= batch.group_end;
  if (!batch.is_first) return;
  const int table = table_of(call, key);
  if (table != batch.table) {
    static_assert(sizeof(CallTable) % sizeof(int) == 0);
    const int* from = reinterpret_cast<const int*>(call.tables + table);
    int* to = reinterpret_cast<int*>(&s.table);
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(CallTable) / sizeof(int)); i += kThreads) {
      to[i] = from[i];
    }
    batch.table = table;
    __syncthreads();
  }
  const Table& t = s.table.table;
  const int64_t size = t.m_head * t.m_last;
  batch.mid = (key - t.key_base) / size;
  batch.group_begin = t.key_base + batch.mid * size;
  batch.group_end = batch.group_begin + size;
  if (t.has_mid && t.is_tiled == call.in_shared) load_mid(batch, s, memory);
}

// Takes prefixes from `begin` on, none past `end` nor of another group.
__device__ inline void take_prefixes(const Call& call, int begin, int end, PrefixBatch& batch,
                                     BatchState& s, float* memory) {
  const int64_t key = first_key(call.plan, begin);
  __syncthreads();  // others may still read what is overwritten here
  enter_group(call, key, batch, s, memory);
  const Table& t = s.table.table;
  const int i = threadIdx.x, q = begin + i;
  bool is_taken = i < s.table.at.prefixes && q < end;
  if (is_taken) {
    const int64_t own = first_key(call.plan, q);
    is_taken = own < batch.group_end;
    if (is_taken) {
      s.starts[i] = call.plan.prefix_starts[q];
      s.ends[i] = call.plan.prefix_starts[q + 1];
      const int64_t digit = (own - batch.group_begin) / t.m_last;
      s.first_key[i] = batch.group_begin + digit * t.m_last;
      s.head[i] = head_place(call, t, digit);
    }
  }
  batch.first = begin;
  batch.count = __syncthreads_count(is_taken);
}

// An element of a head, [n_head, r_head]; zero outside.
__device__ inline float head_element(const Call& call, const Table& t, int64_t place, int x, int a) {
  if (a >= t.r_head) return 0;
  const int64_t at = place * t.head_size() + x * t.r_head + a;
  return t.num_cores == 4 ? call.heads[t.heads_at + at] : load_element(t.cores[0], t.storage, at);
}

// Brings P of every prefix in hand, [m_rows, rank], into `products`; the caller meets before a read.
template <Precision kPrecision>
__device__ inline void make_products(const Call& call, const PrefixBatch& batch, const BatchState& s,
                                     float* memory) {
  const Table& t = s.table.table;
  const BlockLayout& at = s.table.at;
  const int rows = batch.count * t.n_head;
  float* heads = memory + (t.has_mid ? at.heads : at.products);
  const int ld = t.has_mid ? at.ld_head : at.ld_rank;
  const int loaded = kPrecision == Precision::kFloat32 ? rows : round_up_to(rows, 16);
  for (int row = threadIdx.x / 32; row < (t.has_mid ? loaded : rows); row += kWarps) {
    const int64_t place = row < rows ? s.head[row / t.n_head] : 0;
    for (int a = threadIdx.x % 32; a < at.k_head; a += 32) {
      heads[row * ld + a] = row < rows ? head_element(call, t, place, row % t.n_head, a) : 0.0f;
    }
  }
  if (!t.has_mid) return;
  __syncthreads();
  const Columns to{at.k_rank, at.ld_rank};
  const int width = t.n_mid * at.k_rank;
  float* products = memory + at.products;
  const Product p{1, rows, width, at.k_head, at.ld_head, at.ld_mid, 0, 0, {width, 0}};
  mid_product<kPrecision, true, false, 4>(
      p, [&](int) { return Factors{heads, memory + at.mid, 1}; },
      [&](int, int row, int column, int stride, const auto& values) {
        float* out = products + row * at.ld_product + to(column) - column;  // one piece holds all
        for_columns(values, column, stride, width, [&](int c, float v) { out[c] = v; });
      });
}

// Takes the last slices of rows [first, first + count), [rank, n_last] each; one warp takes a row.
__device__ inline void load_lasts(const Call& call, BatchState& s, int first, int count,
                                  float* memory) {
  const Table& t = s.table.table;
  const BlockLayout& at = s.table.at;
  const int lane = threadIdx.x % 32, columns = round_up_to(t.n_last, 4);
  for (int row = threadIdx.x / 32; row < count; row += kWarps) {
    int prefix = 0;
    while (s.ends[prefix] <= first + row) prefix++;
    const int64_t digit = call.plan.row_keys[first + row] - s.first_key[prefix];
    if (lane == 0) {
      s.prefix_of_row[row] = prefix;
      s.last_digit[row] = digit;
    }
    float* out = memory + at.lasts + row * at.last_stride;
    for (int e = lane; e < t.rank * columns; e += 32) {
      const int b = e / columns, z = e % columns;
      out[b * at.ld_last + z] =
          z < t.n_last ? load_element(t.cores[t.last_core()], t.storage,
                                      digit * t.last_size() + b * t.n_last + z)
                       : 0.0f;
    }
  }
}

// Where P of a row's prefix begins.
__device__ inline const float* product_of(const BatchState& s, int prefix, const float* memory) {
  const BlockLayout& at = s.table.at;
  return memory + at.products + prefix * s.table.table.n_head * at.ld_product;
}

}  // namespace torchrec_tt::cuda
