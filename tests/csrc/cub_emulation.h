// A stand-in on the CPU for the device-wide algorithms of CUB that csrc/cuda uses, called alike:
// first without temporary storage, to learn its size, then with it. As CUB does, they may write all
// of the storage, and the sort is stable and looks at the given bits alone. A test can let
// any call fail.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "cuda_emulation.h"

namespace cub {

namespace emulation {

// Whether the call only asks for the size; else uses the storage up.
inline bool is_question(void* storage, size_t& bytes, size_t needed) {
  if (!storage) {
    bytes = needed;
    return true;
  }
  std::memset(storage, 0xff, std::max(bytes, needed));
  return false;
}

}  // namespace emulation

struct DeviceRadixSort {
  template <typename Key, typename Value, typename Count>
  static cudaError_t SortPairs(void* storage, size_t& bytes, const Key* keys_in, Key* keys_out,
                               const Value* values_in, Value* values_out, Count num_items,
                               int begin_bit = 0, int end_bit = sizeof(Key) * 8,
                               cudaStream_t = nullptr) {
    if (const cudaError_t error = cuda_emulation_cub_error()) return error;
    if (emulation::is_question(storage, bytes, num_items + 256)) return cudaSuccess;
    const uint64_t mask = (end_bit >= 64 ? ~uint64_t{0} : (uint64_t{1} << end_bit) - 1) >>
                          begin_bit << begin_bit;
    std::vector<size_t> order(num_items);
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return (static_cast<uint64_t>(keys_in[a]) & mask) < (static_cast<uint64_t>(keys_in[b]) & mask);
    });
    for (size_t i = 0; i < order.size(); i++) {
      keys_out[i] = keys_in[order[i]];
      values_out[i] = values_in[order[i]];
    }
    return cudaSuccess;
  }
};

struct DeviceScan {
  template <typename In, typename Out, typename Count>
  static cudaError_t InclusiveSum(void* storage, size_t& bytes, const In* in, Out* out,
                                  Count num_items, cudaStream_t = nullptr) {
    if (const cudaError_t error = cuda_emulation_cub_error()) return error;
    if (emulation::is_question(storage, bytes, 256)) return cudaSuccess;
    std::partial_sum(in, in + num_items, out);
    return cudaSuccess;
  }
};

}  // namespace cub
