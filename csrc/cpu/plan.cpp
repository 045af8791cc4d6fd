// The plan of a batch: its ids sorted once, so that equal rows and equal prefixes stand together.
//
// Plan tensors, all of upper-bound size, counts last (U unique rows, Q prefixes):
//   order         [N] int32      sorted position -> index
//   inverse       [N] int32      index -> unique row
//   row_keys      [N] int64      key of unique row u < U, ascending
//   row_starts    [N + 1] int32  unique row u's sorted positions are [row_starts[u], row_starts[u + 1])
//   prefix_starts [N + 1] int32  prefix q's unique rows are [prefix_starts[q], prefix_starts[q + 1])
//   counts        [4] int64      U, U that go through the cores, Q, ids out of range
// What lies past U or Q is filled so that it reads as empty: keys INT64_MAX, starts N and, of
// prefixes, the unique rows that go through the cores.
// A key is key_base + (mid * m_head + head) * m_last + last (see tt_shape.h), so keys sort by
// (table, mid, head, last). That of a row in a cache comes past those of all tables: their number +
// the slots of earlier tables' caches + its slot (row_tags.h).
#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "../cache_tags.h"
#include "call.h"
#include "isa.h"

namespace torchrec_tt {
namespace {

constexpr int64_t kSerialBelow = 16384;  // a parallel pass over fewer ids costs more than it saves

// x / d for x < 2^32 in one multiplication (Lemire, Kaser, Kurz 2019); plain division above.
struct Divider {
  uint64_t d;
  uint64_t magic;
  explicit Divider(int64_t divisor, int64_t largest)
      : d(divisor),
        magic(largest < (int64_t{1} << 32) && divisor > 1 ? ~uint64_t{0} / divisor + 1 : 0) {}
  uint64_t operator()(uint64_t x) const {
    if (magic) return static_cast<uint64_t>((static_cast<unsigned __int128>(x) * magic) >> 64);
    return d == 1 ? x : x / d;
  }
};

struct Block {
  int64_t begin, end;
};

std::vector<Block> blocks_of(int64_t n) {
  const int64_t count = n < kSerialBelow ? 1 : torch::stable::get_num_threads();
  std::vector<Block> blocks;
  for (int64_t i = 0; i < count; i++) blocks.push_back({n * i / count, n * (i + 1) / count});
  return blocks;
}

template <typename F>
void for_each_block(const std::vector<Block>& blocks, const F& f) {
  if (blocks.size() == 1) return f(0);
  torch::stable::parallel_for(0, blocks.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) f(i);
  });
}

enum class CheckMode { kFatal, kReplace };

// Gives the indices [begin, end), of one table, whose rows are cached their slots' keys.
template <typename Index, typename Key>
void write_cached_keys(const Index* indices, int64_t begin, int64_t end, const TTShape& table,
                       const CacheTags& cache, Key* keys) {
  constexpr int64_t kAtOnce = 512;
  int64_t ids[kAtOnce], slots[kAtOnce];
  const int64_t num_sets = cache.num_slots / kWays;
  for (; begin < end; begin += kAtOnce) {
    const int64_t count = std::min(kAtOnce, end - begin);
    for (int64_t i = 0; i < count; i++) {
      const int64_t id = static_cast<int64_t>(indices[begin + i]);
      ids[i] = table.row_offset + (id >= 0 && id < table.num_rows ? id : 0);
    }
    kernels<float>().find_slots(ids, count, cache.ids, num_sets, slots);
    for (int64_t i = 0; i < count; i++) {
      const Key key = static_cast<Key>(cache.key_base + slots[i]);
      keys[begin + i] = slots[i] < 0 ? keys[begin + i] : key;
    }
  }
}

// Writes each id's key; returns how many ids were out of range (they read row 0), or throws.
template <typename Index, typename Offset, typename Key>
int64_t write_keys(const Index* indices, const Offset* offsets, const std::vector<TTShape>& tables,
                   const std::vector<CacheTags>& caches, const Features& features, CheckMode mode,
                   Key* keys) {
  int64_t num_bad = 0;
  for (size_t f = 0; f < features.table.size(); f++) {
    const TTShape& table = tables[features.table[f]];
    const int64_t largest = table.padded_rows() - 1;
    const Divider by_last(table.m_last(), largest), by_mid(table.m_mid(), largest);
    const uint64_t m_last = table.m_last(), m_mid = table.m_mid(), m_head = table.m_head();
    const int64_t begin = offsets[f * features.batch_size];
    const int64_t end = offsets[(f + 1) * features.batch_size];
    for (int64_t i = begin; i < end; i++) {
      int64_t id = static_cast<int64_t>(indices[i]);
      if (id < 0 || id >= table.num_rows) [[unlikely]] {
        TT_CHECK(mode != CheckMode::kFatal && table.num_rows > 0, "indices must be in [0, ", table.num_rows,
                 ") for table ", features.table[f], ", got ", id, " at position ", i,
                 " (feature ", f, ")");
        id = 0;
        num_bad++;
      }
      const uint64_t row = static_cast<uint64_t>(id + table.row_offset);
      const uint64_t prefix = by_last(row);
      const uint64_t head = by_mid(prefix);
      const uint64_t mid = prefix - head * m_mid;
      keys[i] = static_cast<Key>(table.key_base + (mid * m_head + head) * m_last +
                                 (row - prefix * m_last));
    }
    const CacheTags& cache = caches[features.table[f]];
    if (cache.num_slots) write_cached_keys(indices, begin, end, table, cache, keys);
  }
  return num_bad;
}

// Stable least-significant-digit radix sort of (key, position); the result is in keys and order.
template <typename Key>
void sort_keys(Key* keys, int32_t* order, int64_t n, uint64_t largest_key, Key* keys_tmp,
               int32_t* order_tmp) {
  int bits = 1;
  while (bits < 64 && (largest_key >> bits)) bits++;
  const int digit_bits = n < 4096 ? 8 : 12;
  const int passes = (bits + digit_bits - 1) / digit_bits;
  const int radix_bits = (bits + passes - 1) / passes;
  const int64_t radix = int64_t{1} << radix_bits;
  const Key mask = static_cast<Key>(radix - 1);
  const auto blocks = blocks_of(n);
  std::vector<int64_t> counts(radix * blocks.size());
  Key *from = keys, *to = keys_tmp;
  int32_t *order_from = order, *order_to = order_tmp;
  for (int pass = 0; pass < passes; pass++) {
    const int shift = pass * radix_bits;
    std::fill(counts.begin(), counts.end(), 0);
    for_each_block(blocks, [&](int64_t t) {
      int64_t* count = &counts[t * radix];
      for (int64_t i = blocks[t].begin; i < blocks[t].end; i++) count[(from[i] >> shift) & mask]++;
    });
    int64_t sum = 0;
    for (int64_t digit = 0; digit < radix; digit++) {
      for (size_t t = 0; t < blocks.size(); t++) {
        sum += std::exchange(counts[t * radix + digit], sum);
      }
    }
    for_each_block(blocks, [&](int64_t t) {
      int64_t* place = &counts[t * radix];
      for (int64_t i = blocks[t].begin; i < blocks[t].end; i++) {
        const int64_t at = place[(from[i] >> shift) & mask]++;
        to[at] = from[i];
        order_to[at] = order_from[i];
      }
    });
    std::swap(from, to);
    std::swap(order_from, order_to);
  }
  if (from != keys) {
    std::memcpy(keys, from, n * sizeof(Key));
    std::memcpy(order, order_from, n * sizeof(int32_t));
  }
}

struct PlanPointers {
  int32_t* order;
  int32_t* inverse;
  int64_t* row_keys;
  int32_t* row_starts;
  int32_t* prefix_starts;
  int64_t* counts;
};

// Marks where the sorted keys change row and prefix; cached rows, from `cached_key` on, have none.
template <typename Key>
void find_rows(const Key* keys, int64_t n, const std::vector<TTShape>& tables, int64_t cached_key,
               const PlanPointers& plan) {
  int64_t num_rows = 0;
  plan.row_starts[0] = 0;
  for (int64_t i = 0; i < n; i++) {  // without a branch: half of the keys are new, in no pattern
    num_rows += i == 0 || keys[i] != keys[i - 1];
    plan.row_keys[num_rows - 1] = static_cast<int64_t>(keys[i]);
    plan.row_starts[num_rows] = static_cast<int32_t>(i + 1);
    plan.inverse[plan.order[i]] = static_cast<int32_t>(num_rows - 1);
  }
  const int64_t num_tt_rows =
      std::lower_bound(plan.row_keys, plan.row_keys + num_rows, cached_key) - plan.row_keys;
  int64_t num_prefixes = 0, t = -1;
  int64_t prefix_end = 0;  // first key past the current prefix
  for (int64_t row = 0; row < num_tt_rows; row++) {
    const int64_t key = plan.row_keys[row];
    if (key < prefix_end) continue;
    while (t < 0 || key >= tables[t].key_base + tables[t].padded_rows()) t++;
    const int64_t m_last = tables[t].m_last();
    prefix_end = tables[t].key_base + ((key - tables[t].key_base) / m_last + 1) * m_last;
    plan.prefix_starts[num_prefixes++] = static_cast<int32_t>(row);
  }
  std::fill(plan.row_keys + num_rows, plan.row_keys + n, std::numeric_limits<int64_t>::max());
  std::fill(plan.row_starts + num_rows, plan.row_starts + n + 1, static_cast<int32_t>(n));
  std::fill(plan.prefix_starts + num_prefixes, plan.prefix_starts + n + 1,
            static_cast<int32_t>(num_tt_rows));
  plan.counts[0] = num_rows;
  plan.counts[1] = num_tt_rows;
  plan.counts[2] = num_prefixes;
}

template <typename Index, typename Offset, typename Key>
void make_plan(const Index* indices, const Offset* offsets, int64_t n,
               const std::vector<TTShape>& tables, const std::vector<CacheTags>& caches,
               const Features& features, CheckMode mode, const PlanPointers& plan) {
  const int64_t num_offsets = static_cast<int64_t>(features.table.size()) * features.batch_size + 1;
  check_offsets(offsets, num_offsets, n);
  std::vector<Key> keys(2 * n);
  std::vector<int32_t> order_tmp(n);
  plan.counts[3] = write_keys(indices, offsets, tables, caches, features, mode, keys.data());
  for (int64_t i = 0; i < n; i++) plan.order[i] = static_cast<int32_t>(i);
  const int64_t largest_key = caches.back().key_base + caches.back().num_slots - 1;
  sort_keys(keys.data(), plan.order, n, largest_key, keys.data() + n, order_tmp.data());
  find_rows(keys.data(), n, tables, caches.front().key_base, plan);
}

template <typename Index, typename Offset>
void make_plan_by_key(const Tensor& indices, const Tensor& offsets,
                      const std::vector<TTShape>& tables, const std::vector<CacheTags>& caches,
                      const Features& features, CheckMode mode, const PlanPointers& plan) {
  const auto* index = static_cast<const Index*>(indices.const_data_ptr());
  const auto* offset = static_cast<const Offset*>(offsets.const_data_ptr());
  const int64_t n = indices.numel();
  const int64_t num_keys = caches.back().key_base + caches.back().num_slots;
  if (num_keys <= int64_t{std::numeric_limits<uint32_t>::max()}) {
    make_plan<Index, Offset, uint32_t>(index, offset, n, tables, caches, features, mode, plan);
  } else {
    make_plan<Index, Offset, uint64_t>(index, offset, n, tables, caches, features, mode, plan);
  }
}

bool is_int64(const Tensor& tensor, const char* name) {
  TT_CHECK(tensor.dim() == 1, name, " must have 1 dimension, got ", tensor.dim());
  TT_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  const ScalarType type = tensor.scalar_type();
  TT_CHECK(type == ScalarType::Int || type == ScalarType::Long, name,
           " must be int32 or int64, got ", type);
  return type == ScalarType::Long;
}

std::vector<Tensor> plan(const Tensor& indices, const Tensor& offsets,
                         const std::vector<int64_t>& tables_flat,
                         const std::vector<int64_t>& feature_tables, std::string check_mode,
                         const Tensors& cache_ids) {
  const auto tables = decode_tables(tables_flat);
  TT_CHECK(!tables.empty(), "tables must not be empty");
  const bool long_indices = is_int64(indices, "indices");
  const bool long_offsets = is_int64(offsets, "offsets");
  const Features features(feature_tables, tables, offsets.numel());
  const std::vector<CacheTags> caches = take_tags(cache_ids, tables, check_cache_ids);
  const int64_t n = indices.numel();
  TT_CHECK(n < std::numeric_limits<int32_t>::max(), "indices must have less than 2^31 entries, got ",
           n);
  TT_CHECK(check_mode == "fatal" || check_mode == "warning" || check_mode == "ignore",
           "check_mode must be fatal, warning or ignore, got ", check_mode);
  const CheckMode mode = check_mode == "fatal" ? CheckMode::kFatal : CheckMode::kReplace;
  for (const TTShape& table : tables) {
    TT_CHECK(long_indices || table.num_rows - 1 <= std::numeric_limits<int32_t>::max(),
             "indices must be int64 for a table of ", table.num_rows, " rows, got int32");
  }

  const auto make = [](int64_t size, ScalarType type) { return torch::stable::empty({size}, type); };
  Tensor order = make(n, ScalarType::Int), inverse = make(n, ScalarType::Int);
  Tensor row_keys = make(n, ScalarType::Long), row_starts = make(n + 1, ScalarType::Int);
  Tensor prefix_starts = make(n + 1, ScalarType::Int), counts = make(4, ScalarType::Long);
  const PlanPointers pointers{static_cast<int32_t*>(order.mutable_data_ptr()),
                              static_cast<int32_t*>(inverse.mutable_data_ptr()),
                              static_cast<int64_t*>(row_keys.mutable_data_ptr()),
                              static_cast<int32_t*>(row_starts.mutable_data_ptr()),
                              static_cast<int32_t*>(prefix_starts.mutable_data_ptr()),
                              static_cast<int64_t*>(counts.mutable_data_ptr())};
  const auto make_for = long_indices ? (long_offsets ? make_plan_by_key<int64_t, int64_t>
                                                     : make_plan_by_key<int64_t, int32_t>)
                                     : (long_offsets ? make_plan_by_key<int32_t, int64_t>
                                                     : make_plan_by_key<int32_t, int32_t>);
  make_for(indices, offsets, tables, caches, features, mode, pointers);
  return {order, inverse, row_keys, row_starts, prefix_starts, counts};
}

}  // namespace
}  // namespace torchrec_tt

STABLE_TORCH_LIBRARY_IMPL(torchrec_tt, CPU, m) { m.impl("plan", TORCH_BOX(&torchrec_tt::plan)); }
