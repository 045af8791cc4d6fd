// Kernels with and without the faults that the emulation must find (test_cuda_emulation.py).
#include "device.h"

namespace {

// out[i] = in[n - 1 - i] of a block of n, through shared memory
__global__ void reverse_kernel(const int* in, int* out, int with_barrier) {
  TT_SHARED(int, tile, 256);
  const int i = threadIdx.x, n = blockDim.x;
  tile[i] = in[blockIdx.x * n + i];
  if (with_barrier) __syncthreads();
  out[blockIdx.x * n + i] = tile[n - 1 - i];
}

// as above, in a warp; a shuffle orders no memory
__global__ void reverse_in_warp(const int* in, int* out, int barrier) {
  TT_DYN_SMEM(int, tile);
  const int i = threadIdx.x, lane = i % 32;
  tile[i] = in[i];
  if (barrier == 1) __syncwarp();
  if (barrier == 2) __shfl_sync(~0u, i, 0);
  if (barrier == 3) __syncwarp(lane < 16 ? 0xffffu : 0xffff0000u);
  out[i] = tile[i / 32 * 32 + 31 - lane];
}

// two rounds through one tile; the second barrier keeps a write from those that still read
__global__ void two_rounds(const int* in, int* out, int with_second) {
  TT_SHARED(int, tile, 256);
  const int i = threadIdx.x, n = blockDim.x;
  int sum = 0;
  for (int round = 0; round < 2; round++) {
    tile[i] = in[i] + round;
    __syncthreads();
    sum += tile[(i + 1) % n];
    if (with_second) __syncthreads();
  }
  out[i] = sum;
}

__global__ void divergent_kernel(int* out, int kind) {
  const int i = threadIdx.x;
  if (kind == 0 && i < 7) return;
  if (kind == 1 && i % 2) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  if (kind == 2 && i > 40) __syncthreads();
  if (kind == 3 && i % 32 < 16) __syncwarp();
  if (kind == 4) out[0] += i % 2 ? __shfl_sync(~0u, i, 0) : static_cast<int>(__ballot_sync(~0u, 1));
  if (kind == 5) __syncwarp(2u);
}

__global__ void unwritten_kernel(const int* in, int* out, int kind) {
  TT_DYN_SMEM(int, dynamic);
  TT_SHARED(int, fixed, 64);
  const int i = threadIdx.x;
  if (i != 5) dynamic[i] = in[i];
  if (i != 7) fixed[i] = in[i];
  __syncthreads();
  out[i] = kind == 0 ? dynamic[i] : kind == 1 ? fixed[i] : 0;
}

__global__ void count_kernel(int* out, int kind) {
  if (kind == 0) atomicAdd(out, 1);
  if (kind == 1 && threadIdx.x == 0) out[0] += 1;
  if (kind == 2) out[0] += 1;
  if (kind == 3) out[0] = __ldg(out + 1 + threadIdx.x * 0);
  if (kind == 4 && threadIdx.x == 0 && blockIdx.x == 0) out[0] = 1 + __ldg(out);
  if (kind == 5 && threadIdx.x + blockIdx.x == 0) {
    out[0] = 3;
    out[1] = __ldg(out);
  }
}

// bytes of one word from different threads are no race
template <bool kIsAllowed>
__global__ void bytes_kernel(uint8_t* out) {
  TT_SHARED(uint8_t, bytes, 64);
  bytes[threadIdx.x] = static_cast<uint8_t>(threadIdx.x);
  bytes[threadIdx.x] += 1;
  __syncthreads();
  out[threadIdx.x] = bytes[63 - threadIdx.x];
}

// out: sums of the block by shuffles, a butterfly, votes and halves of a warp
__global__ void collectives_kernel(int* out) {
  const int i = threadIdx.x, lane = i % 32;
  int down = i, butterfly = i;
  for (int k = 16; k; k >>= 1) down += __shfl_down_sync(~0u, down, k);
  for (int k = 16; k; k >>= 1) butterfly += __shfl_xor_sync(~0u, butterfly, k);
  const int up = __shfl_up_sync(~0u, i, 1, 8);
  const unsigned half = lane < 16 ? 0xffffu : 0xffff0000u;
  int of_half = i;
  for (int k = 8; k; k >>= 1) of_half += __shfl_xor_sync(half, of_half, k);
  const unsigned odd = __ballot_sync(~0u, i % 2);
  const unsigned same = __match_any_sync(~0u, lane / 4);
  int* mine = out + i * 10;
  mine[0] = __shfl_sync(~0u, down, 0);
  mine[1] = butterfly;
  mine[2] = up;
  mine[3] = of_half;
  mine[4] = static_cast<int>(odd);
  mine[5] = static_cast<int>(same);
  mine[6] = __any_sync(~0u, i == 3);
  mine[7] = __all_sync(~0u, i < 32);
  mine[8] = __syncthreads_count(i % 3 == 0);
  mine[9] = __syncthreads_or(i == 3) + 2 * __syncthreads_and(i < 99);
}

}  // namespace

extern "C" {
void reverse(const int* in, int* out, int blocks, int threads, int with_barrier) {
  TT_LAUNCH(reverse_kernel, blocks, threads, 0, nullptr, in, out, with_barrier);
}
void reverse_warp(const int* in, int* out, int barrier) {
  TT_LAUNCH(reverse_in_warp, 1, 64, 64 * sizeof(int), nullptr, in, out, barrier);
}
void rounds(const int* in, int* out, int with_second) {
  TT_LAUNCH(two_rounds, 1, 96, 0, nullptr, in, out, with_second);
}
void diverge(int* out, int kind) { TT_LAUNCH(divergent_kernel, 1, 64, 0, nullptr, out, kind); }
void read_unwritten(const int* in, int* out, int kind) {
  TT_LAUNCH(unwritten_kernel, 2, 64, 64 * sizeof(int), nullptr, in, out, kind);
}
void count(int* out, int kind) { TT_LAUNCH(count_kernel, 3, 32, 0, nullptr, out, kind); }
void count_twice(int* out) {
  TT_LAUNCH(count_kernel, 1, 32, 0, nullptr, out, 1);
  TT_LAUNCH(count_kernel, 1, 32, 0, nullptr, out, 1);
}
void bytes(uint8_t* out) { TT_LAUNCH(bytes_kernel<false>, 1, 64, 0, nullptr, out); }
void collectives(int* out) { TT_LAUNCH(collectives_kernel, 1, 64, 0, nullptr, out); }
void take_shared(uint8_t* out, int bytes) {
  TT_LAUNCH(bytes_kernel<false>, 1, 64, bytes, nullptr, out);
}
int take_allowed_shared(uint8_t* out, int bytes) {
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (cudaFuncSetAttribute(bytes_kernel<true>, attribute, bytes) != cudaSuccess) return 1;
  TT_LAUNCH(bytes_kernel<true>, 1, 64, bytes, nullptr, out);
  return 0;
}
}
