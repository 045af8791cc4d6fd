// The lookup of many rows' tags: a set of 8 is compared at once, without a branch per id.
#pragma once

#include "../row_tags.h"
#include "microkernels.h"

namespace torchrec_tt::TT_ISA {

typedef Lanes<int64_t, TT_VECTOR_BYTES / 8>::type Tags;
constexpr int64_t kTagsAtOnce = TT_VECTOR_BYTES / 8;
constexpr int64_t kTagsAhead = 64;  // ids whose sets are asked for before the first is read

TT_INLINE int64_t or_lanes(Tags v) {
#if TT_VECTOR_BYTES == 64
  const auto half = __builtin_shufflevector(v, v, 0, 1, 2, 3) | __builtin_shufflevector(v, v, 4, 5, 6, 7);
  const auto pair = __builtin_shufflevector(half, half, 0, 1) | __builtin_shufflevector(half, half, 2, 3);
  return pair[0] | pair[1];
#elif TT_VECTOR_BYTES == 32
  const auto pair = __builtin_shufflevector(v, v, 0, 1) | __builtin_shufflevector(v, v, 2, 3);
  return pair[0] | pair[1];
#else
  return v[0] | v[1];
#endif
}

// Bit `first_bit` + way for every way of a set that holds the id.
TT_INLINE Tags match(const int64_t* set, int64_t id, int first_bit) {
  static constexpr int64_t kBits[kWays] = {1, 2, 4, 8, 16, 32, 64, 128};
  Tags found{};
  TT_UNROLL for (int64_t way = 0; way < kWays; way += kTagsAtOnce) {
    const Tags tags = *reinterpret_cast<const Tags*>(set + way);
    const Tags bits = *reinterpret_cast<const Tags*>(kBits + way);
    found |= (tags == (Tags{} + id)) & bits << first_bit;
  }
  return found;
}

// slots[i]: where row ids[i] lies among num_sets > 0 sets of tags, or -1.
static void find_slots(const int64_t* ids, int64_t n, const int64_t* tags, int64_t num_sets,
                       int64_t* slots) {
  int64_t first[kTagsAhead], second[kTagsAhead];
  for (int64_t begin = 0; begin < n; begin += kTagsAhead) {
    const int64_t count = n - begin < kTagsAhead ? n - begin : kTagsAhead;
    for (int64_t i = 0; i < count; i++) {
      const uint64_t hash = hash_row(ids[begin + i]);
      first[i] = first_set(hash, num_sets) * kWays;
      second[i] = second_set(hash, num_sets) * kWays;
    }
    for (int64_t i = 0; i < count; i++) {
      __builtin_prefetch(tags + first[i]);
      __builtin_prefetch(tags + second[i]);
    }
    for (int64_t i = 0; i < count; i++) {
      const int64_t id = ids[begin + i];
      const int64_t found =
          or_lanes(match(tags + first[i], id, 0) | match(tags + second[i], id, kWays));
      const int64_t bit = __builtin_ctzll(found | int64_t{1} << 2 * kWays);
      const int64_t slot = bit < kWays ? first[i] + bit : second[i] + bit - kWays;
      slots[begin + i] = found ? slot : -1;
    }
  }
}

}  // namespace torchrec_tt::TT_ISA
