// Runs CUDA kernels on the CPU: the text of a .cu or .cuh file, compiled by g++ with this header in
// the place of <cuda_runtime.h> (csrc/cuda/device.h does that under TT_CUDA_EMULATION).
//
// Every CUDA thread is a fiber; blocks run one after another, and within a block the fibers take
// turns at barriers and warp collectives, in an order that set_schedule chooses. Files are compiled
// with -fsanitize=thread, whose hooks cuda_emulation_races.cpp defines in its own way: it sees every
// load and store of a kernel, so these are errors under every schedule, not only when values come
// out wrong:
//   - a race: two threads touch a word, one of them writes, and no __syncthreads, __syncwarp or end
//     of a launch lies between (a missing barrier, or a lost update of global memory). Warp
//     collectives (shuffles, votes) order nothing in memory, as in CUDA; atomics race with plain
//     accesses alone;
//   - a read of shared memory that this block has not written (it holds NaNs);
//   - __ldg of what the same launch wrote;
//   - a barrier that not all threads reach, or that they reach at different places; a warp
//     collective whose lanes do not all come, or come to different ones;
//   - more shared memory than the launch may have.
// Barriers (__syncthreads and its votes, __syncwarp) have an identity at run time, file and line:
// a test can switch one off and see what goes wrong (emulation.py).
//
// Not emulated: speed, occupancy, asynchronous copies, fences and other ways of talking between
// blocks of one launch, memory ordering weaker than the above, out-of-bounds global accesses.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(n) alignas(n)
#define __grid_constant__

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0;
constexpr cudaError_t cudaErrorInvalidValue = 1;
constexpr int warpSize = 32;

namespace cuda_emulation {

enum class Access { kRead, kWrite, kAtomic, kConstantRead };

// What a lane waits in: lanes that meet in a collective must be in the same one.
enum class Collective { kSyncWarp, kShuffle, kVote, kMatch, kOther };

constexpr size_t kMaxLaneBytes = 64;

// These do not change during a thread's life, so the compiler may keep them in registers.
__attribute__((const)) dim3 thread_index();
__attribute__((const)) dim3 block_index();
__attribute__((const)) dim3 block_dim();
__attribute__((const)) dim3 grid_dim();
__attribute__((const)) int lane_index();
__attribute__((const)) void* dynamic_shared();

void* static_shared(const void* site, size_t bytes);
void note_access(const void* address, size_t bytes, Access access);
// Plain bytes, which the hooks do not see.
void copy_unseen(void* to, const void* from, size_t bytes);
int barrier_site(const char* file, int line, const char* what);
// Meets all threads of the block; returns how many gave a true predicate.
int sync_block(int site, int predicate);
void sync_warp(int site, unsigned mask);
// Meets the lanes of mask; returns what every lane gave, lane i's at i * kMaxLaneBytes.
const unsigned char* collective(unsigned mask, Collective kind, const void* value, size_t bytes);
void launch(const void* kernel, const char* name, dim3 grid, dim3 block, size_t dynamic_bytes,
            const std::function<void()>& body);

// Gives `value` to the other lanes of mask; the result's operator() returns lane i's.
template <typename T>
struct Lanes {
  const unsigned char* values;
  T operator()(int lane) const {
    T value;
    std::memcpy(&value, values + lane * kMaxLaneBytes, sizeof(T));
    return value;
  }
};
template <typename T>
Lanes<T> exchange(unsigned mask, const T& value, Collective kind = Collective::kOther) {
  static_assert(sizeof(T) <= kMaxLaneBytes);
  return {collective(mask, kind, &value, sizeof(T))};
}

template <typename T>
T shuffle(unsigned mask, T value, int lane, int source, int width) {
  const bool is_inside = source >= 0 && source / width == lane / width;
  const auto lanes = exchange(mask, value, Collective::kShuffle);
  return lanes(is_inside ? source : lane);
}

template <typename T, typename F>
T atomic(T* address, const F& f) {
  note_access(address, sizeof(T), Access::kAtomic);
  T old;
  copy_unseen(&old, address, sizeof(T));
  const T next = f(old);
  copy_unseen(address, &next, sizeof(T));
  return old;
}

}  // namespace cuda_emulation

#define threadIdx (::cuda_emulation::thread_index())
#define blockIdx (::cuda_emulation::block_index())
#define blockDim (::cuda_emulation::block_dim())
#define gridDim (::cuda_emulation::grid_dim())

#define TT_LAUNCH(kernel, grid, block, dynamic_bytes, stream, ...)                              \
  (static_cast<void>(stream),                                                                   \
   ::cuda_emulation::launch(reinterpret_cast<const void*>(kernel), #kernel, grid, block,        \
                            dynamic_bytes, [=] { kernel(__VA_ARGS__); }))
#define TT_DYN_SMEM(T, name) T* const name = static_cast<T*>(::cuda_emulation::dynamic_shared())
#define TT_SHARED(T, name, count)                                                               \
  T* const name = static_cast<T*>([](size_t bytes) {                                            \
    static const char site = 0;                                                                 \
    return ::cuda_emulation::static_shared(&site, bytes);                                       \
  }(sizeof(T) * (count)))
#define TT_UNROLL

#define TT_SYNC_BLOCK_(what, predicate)                                                         \
  ::cuda_emulation::sync_block(::cuda_emulation::barrier_site(__FILE__, __LINE__, what),        \
                               (predicate) ? 1 : 0)
#define __syncthreads() static_cast<void>(TT_SYNC_BLOCK_("__syncthreads", 0))
#define __syncthreads_or(p) static_cast<int>(TT_SYNC_BLOCK_("__syncthreads_or", p) > 0)
#define __syncthreads_and(p) static_cast<int>(TT_SYNC_BLOCK_("__syncthreads_and", !(p)) == 0)
#define __syncthreads_count(p) TT_SYNC_BLOCK_("__syncthreads_count", p)
// With a mask or without one: the whole warp.
#define __syncwarp(...)                                                                         \
  ::cuda_emulation::sync_warp(::cuda_emulation::barrier_site(__FILE__, __LINE__, "__syncwarp"), \
                              ~0u __VA_OPT__(&(__VA_ARGS__)))

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = cuda_emulation::lane_index();
  return cuda_emulation::shuffle(mask, value, lane, lane / width * width + source % width, width);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  const int lane = cuda_emulation::lane_index();
  return cuda_emulation::shuffle(mask, value, lane, lane ^ lanes, width);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = cuda_emulation::lane_index();
  return cuda_emulation::shuffle(mask, value, lane, lane + static_cast<int>(delta), width);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = cuda_emulation::lane_index();
  return cuda_emulation::shuffle(mask, value, lane, lane - static_cast<int>(delta), width);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const auto lanes =
      cuda_emulation::exchange<int>(mask, predicate != 0, cuda_emulation::Collective::kVote);
  unsigned votes = 0;
  for (int lane = 0; lane < 32; lane++) {
    if (mask >> lane & 1 && lanes(lane)) votes |= 1u << lane;
  }
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  const auto lanes = cuda_emulation::exchange(mask, value, cuda_emulation::Collective::kMatch);
  unsigned equal = 0;
  for (int lane = 0; lane < 32; lane++) {
    if (mask >> lane & 1 && lanes(lane) == value) equal |= 1u << lane;
  }
  return equal;
}

template <typename T>
T atomicAdd(T* address, T value) {
  return cuda_emulation::atomic(address, [=](T old) { return static_cast<T>(old + value); });
}
template <typename T>
T atomicMax(T* address, T value) {
  return cuda_emulation::atomic(address, [=](T old) { return std::max(old, value); });
}
template <typename T>
T atomicMin(T* address, T value) {
  return cuda_emulation::atomic(address, [=](T old) { return std::min(old, value); });
}
template <typename T>
T atomicOr(T* address, T value) {
  return cuda_emulation::atomic(address, [=](T old) { return old | value; });
}
template <typename T>
T atomicExch(T* address, T value) {
  return cuda_emulation::atomic(address, [=](T) { return value; });
}
template <typename T>
T atomicCAS(T* address, T expected, T value) {
  return cuda_emulation::atomic(address, [=](T old) { return old == expected ? value : old; });
}
template <typename T>
T __ldg(const T* address) {
  cuda_emulation::note_access(address, sizeof(T), cuda_emulation::Access::kConstantRead);
  T value;
  cuda_emulation::copy_unseen(&value, address, sizeof(T));
  return value;
}
inline void __threadfence() {}
inline void __threadfence_system() {}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
using std::max;
using std::min;

struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(unsigned short x) { return {x}; }
inline float __half2float(__half x) { return __builtin_bit_cast(_Float16, x.bits); }
inline __half __float2half_rn(float x) {
  return {__builtin_bit_cast(uint16_t, static_cast<_Float16>(x))};
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return {x}; }
inline float __bfloat162float(__nv_bfloat16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const unsigned bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr {
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
};
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cuda_emulation_cub_error();
cudaError_t cuda_emulation_set_attribute(const void* kernel, cudaFuncAttribute, int value);
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
  return cuda_emulation_set_attribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
constexpr unsigned cudaHostAllocMapped = 2, cudaHostAllocPortable = 1;
inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = std::malloc(bytes);
  return cudaSuccess;
}
struct cudaFuncAttributes {};
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel*) {
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaGetLastError(); }
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t = nullptr) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
