// Where a cached row may lie: in one of two sets of 8 slots, which its id alone decides.
//
// A table's tags are ids [C], the row id in every slot (-1: empty); set s is [8 s, 8 s + 8). With two
// sets to choose from a row finds a free slot until the cache is nearly full, without moving others.
// Torch-free and for host and device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TT_HOST_DEVICE __host__ __device__
#else
#define TT_HOST_DEVICE
#endif

namespace torchrec_tt {

constexpr int64_t kWays = 8;  // of a set: one cache line of tags

// The tags of a table's row cache, and the key of its slot 0.
struct CacheTags {
  const int64_t* ids;  // [num_slots]
  int64_t num_slots, key_base;
};

// MurmurHash3's 64-bit finaliser: every bit of the id changes half of the bits.
TT_HOST_DEVICE static inline uint64_t hash_row(int64_t id) {
  uint64_t h = static_cast<uint64_t>(id);
  h = (h ^ h >> 33) * 0xff51afd7ed558ccdULL;
  h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53ULL;
  return h ^ h >> 33;
}

// The two sets of an id, possibly one and the same: each half of its hash, scaled to num_sets < 2^31.
TT_HOST_DEVICE static inline int64_t first_set(uint64_t hash, int64_t num_sets) {
  return static_cast<int64_t>((hash >> 32) * static_cast<uint64_t>(num_sets) >> 32);
}
TT_HOST_DEVICE static inline int64_t second_set(uint64_t hash, int64_t num_sets) {
  return static_cast<int64_t>((hash & 0xffffffff) * static_cast<uint64_t>(num_sets) >> 32);
}

// The slot of row `id`, or -1; num_sets may be 0.
TT_HOST_DEVICE static inline int64_t find_slot(int64_t id, const int64_t* tags, int64_t num_sets) {
  if (num_sets == 0) return -1;
  const uint64_t hash = hash_row(id);
  const int64_t first = first_set(hash, num_sets) * kWays;
  const int64_t second = second_set(hash, num_sets) * kWays;
  int64_t slot = -1;
  for (int64_t way = 0; way < kWays; way++) {
    slot = tags[first + way] == id ? first + way : slot;
    slot = tags[second + way] == id ? second + way : slot;
  }
  return slot;
}

}  // namespace torchrec_tt
