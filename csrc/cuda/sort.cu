// CUB's algorithms, compiled here alone: they take longer than all our kernels.
#include "sort.h"

#ifdef TT_CUDA_EMULATION
#include "cub_emulation.h"  // tests/csrc
#else
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#endif

#include "launchers.h"

namespace torchrec_tt::cuda {

void sort_pairs(void* storage, size_t& bytes, const uint32_t* keys, uint32_t* sorted_keys,
                const int32_t* values, int32_t* sorted_values, int64_t count, int bits,
                cudaStream_t stream) {
  check_cuda(cub::DeviceRadixSort::SortPairs(storage, bytes, keys, sorted_keys, values, sorted_values,
                                             count, 0, bits, stream));
}

void sort_pairs(void* storage, size_t& bytes, const uint64_t* keys, uint64_t* sorted_keys,
                const int32_t* values, int32_t* sorted_values, int64_t count, int bits,
                cudaStream_t stream) {
  check_cuda(cub::DeviceRadixSort::SortPairs(storage, bytes, keys, sorted_keys, values, sorted_values,
                                             count, 0, bits, stream));
}

void sum_up(void* storage, size_t& bytes, uint64_t* values, int64_t count, cudaStream_t stream) {
  check_cuda(cub::DeviceScan::InclusiveSum(storage, bytes, values, values, count, stream));
}

}  // namespace torchrec_tt::cuda
