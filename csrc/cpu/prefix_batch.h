// Prefixes of one group taken together, so that their products are one matrix product.
#pragma once

#include "storage.h"

namespace torchrec_tt::TT_ISA {

// out [cols, ld_out] = in [rows, cols]^T, the columns of out past `rows` zero.
template <typename T>
TT_INLINE void transpose(const T* in, int64_t rows, int64_t cols, int64_t ld_in, T* out,
                         int64_t ld_out) {
  typedef typename Lanes<T, 4>::type Four;
  const auto at = [](const T* p) -> const Four& { return *reinterpret_cast<const Four*>(p); };
  const auto put = [](T* p, Four v) { *reinterpret_cast<Four*>(p) = v; };
  int64_t i = 0;
  for (; i + 4 <= rows; i += 4) {
    const T* from = in + i * ld_in;
    int64_t j = 0;
    for (; j + 4 <= cols; j += 4) {
      const Four a = at(from + j), b = at(from + ld_in + j);
      const Four c = at(from + 2 * ld_in + j), d = at(from + 3 * ld_in + j);
      const Four ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5);
      const Four ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      const Four cd0 = __builtin_shufflevector(c, d, 0, 4, 1, 5);
      const Four cd1 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      put(out + j * ld_out + i, __builtin_shufflevector(ab0, cd0, 0, 1, 4, 5));
      put(out + (j + 1) * ld_out + i, __builtin_shufflevector(ab0, cd0, 2, 3, 6, 7));
      put(out + (j + 2) * ld_out + i, __builtin_shufflevector(ab1, cd1, 0, 1, 4, 5));
      put(out + (j + 3) * ld_out + i, __builtin_shufflevector(ab1, cd1, 2, 3, 6, 7));
    }
    for (; j < cols; j++) {
      for (int64_t k = 0; k < 4; k++) out[j * ld_out + i + k] = from[k * ld_in + j];
    }
  }
  for (; i < ld_out; i++) {
    for (int64_t j = 0; j < cols; j++) out[j * ld_out + i] = i < rows ? in[i * ld_in + j] : T(0);
  }
}

template <typename T>
TT_INLINE void copy(const T* from, int64_t n, T* to) {
  int64_t i = 0;
  for (; i + kWidth<T> <= n; i += kWidth<T>) store(to + i, load(from + i));
  for (; i < n; i++) to[i] = from[i];
}

// A slice [rows, rank] with rows of ld_rank: itself where they are equal, else a copy in `scratch`.
template <typename T>
TT_INLINE const T* padded(const T* slice, int64_t rows, int64_t rank, int64_t ld_rank, T* scratch) {
  if (rank == ld_rank) return slice;
  for (int64_t i = 0; i < rows; i++) {
    copy(slice + i * rank, rank, scratch + i * ld_rank);
    for (int64_t b = rank; b < ld_rank; b++) scratch[i * ld_rank + b] = 0;
  }
  return scratch;
}

// How soon something is read: what is asked for early, or is large, goes no nearer than the second
// cache, where it drives out nothing that is at work.
enum Soon { kLater = 2, kNow = 3 };

template <Soon kSoon = kNow, typename T>
TT_INLINE void prefetch(const T* from, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / sizeof(T)) __builtin_prefetch(from + i, 0, kSoon);
}

template <typename T>
TT_INLINE void prefetch_to_write(T* to, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / sizeof(T)) __builtin_prefetch(to + i, 1);
}

// Walks the prefixes of a chunk, some of one group (a mid digit) at a time.
template <typename T>
struct PrefixBatch {
  const TableView<T>& table;
  const PlanView& plan;
  T* heads;        // [prefixes_at_once, n_head * r_head]
  T* products;     // [prefixes_at_once, product_size]
  T* mid_scratch;  // [padded_mid_size]
  T* wide_mid;     // [mid_size], for a core of 16 or 8 bits
  int64_t mid = -1, group_begin = 0, group_end = 0;  // digit and keys of the group
  const T* mid_slice = nullptr;                      // [r_head, n_mid * ld_rank]
  int64_t first = 0, count = 0;                      // prefixes [first, first + count)
  int64_t head[kPrefixesAtOnce];                     // their heads' places in table.head
  int64_t first_key[kPrefixesAtOnce];                // keys of their rows with last digit 0
  const T* product_of[kPrefixesAtOnce];              // their P [m_rows, ld_rank]
  const T *next_mid = nullptr, *next_mid_end = nullptr;  // what is still to be asked for
  int64_t part_size = 0;

  PrefixBatch(const TableView<T>& t, const PlanView& p, const ChunkScratch<T>& at)
      : table(t), plan(p), heads(at.heads), products(at.products), mid_scratch(at.mid),
        wide_mid(at.wide_mid) {}

  int64_t key_of(int64_t prefix) const {
    return plan.row_keys[plan.prefix_starts[prefix]] - table.key_base;
  }

  bool ends_group(int64_t end) const {
    return first + count == end || key_of(first + count) >= group_end;
  }

  void enter_group(int64_t key) {
    const int64_t size = table.m_head * table.m_last, mid_size = table.mid_size();
    mid = key / size;
    group_begin = mid * size;
    group_end = group_begin + size;
    if (!table.has_mid) return;
    mid_slice = padded(slice_elements(table.mid, table.storage, mid, mid_size, wide_mid),
                       table.r_head * table.n_mid, table.rank, table.ld_rank, mid_scratch);
  }

  // The next group is most likely that of the next digit. Its slice is asked for in as many parts
  // as there are prefixes in a new group's first batch: at once, it would hold up all else.
  void plan_prefetch() {
    const int64_t size = table.mid_size();
    next_mid = next_mid_end = nullptr;
    if (mid + 1 == table.m_mid || table.storage != Storage::kNative) return;
    next_mid = static_cast<const T*>(table.mid) + (mid + 1) * size;
    next_mid_end = next_mid + size;
    part_size = round_up((size + count - 1) / count, 64 / sizeof(T));
  }

  void prefetch_part_of_next_mid() {
    const int64_t left = next_mid_end - next_mid, size = left < part_size ? left : part_size;
    prefetch<kLater>(next_mid, size);
    next_mid += size;
  }

  void take_head(int64_t slot, int64_t place) {
    const int64_t size = table.head_size();
    T* packed = heads + slot * size;
    const T* slice = slice_elements(table.head, table.head_storage, place, size, packed);
    T* out = products + slot * table.product_size();
    if (!table.has_mid) {
      product_of[slot] = padded(slice, table.m_rows, table.rank, table.ld_rank, out);
      return;
    }
    product_of[slot] = out;
    if (slice != packed) copy(slice, size, packed);
  }

  // Takes prefixes of one group from `begin` on, none past `end`, and computes their products.
  void take(int64_t begin, int64_t end) {
    const int64_t depth = prefixes_at_once(table);
    const bool is_new = key_of(begin) >= group_end;
    if (is_new) enter_group(key_of(begin));
    first = begin;
    for (count = 0; count < depth && begin + count < end; count++) {
      const int64_t key = key_of(begin + count);
      if (key >= group_end) break;
      const int64_t digit = (key - group_begin) / table.m_last;
      head[count] = table.head_at ? table.head_at[begin + count] : digit;
      first_key[count] = table.key_base + group_begin + digit * table.m_last;
      take_head(count, head[count]);
    }
    if (!table.has_mid) return;
    const int64_t n = table.n_mid * table.ld_rank;
    product(heads, table.r_head, mid_slice, n, count * table.n_head, table.r_head, n, products, n);
    if (is_new) plan_prefetch();
  }
};

}  // namespace torchrec_tt::TT_ISA
