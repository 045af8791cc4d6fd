// Device-wide sort and scan. Without storage a call only says in `bytes` how much it needs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device.h"

namespace torchrec_tt::cuda {

// Sorts by the lowest `bits` bits of the keys; equal ones keep their order.
void sort_pairs(void* storage, size_t& bytes, const uint32_t* keys, uint32_t* sorted_keys,
                const int32_t* values, int32_t* sorted_values, int64_t count, int bits,
                cudaStream_t stream);
void sort_pairs(void* storage, size_t& bytes, const uint64_t* keys, uint64_t* sorted_keys,
                const int32_t* values, int32_t* sorted_values, int64_t count, int bits,
                cudaStream_t stream);

// Every element becomes the sum of those up to it.
void sum_up(void* storage, size_t& bytes, uint64_t* values, int64_t count, cudaStream_t stream);

// How many bits the numbers up to `largest` take, at least 1.
inline int bits_of(uint64_t largest) {
  int bits = 1;
  while (bits < 64 && (largest >> bits)) bits++;
  return bits;
}

}  // namespace torchrec_tt::cuda
