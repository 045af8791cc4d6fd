// The CUDA language as nvcc has it, or, in tests, its emulation on the CPU: one text for both.
//
// A kernel file includes this header and no header of torch, and goes through these macros:
//   TT_LAUNCH(kernel, grid, block, dynamic_bytes, stream, arguments...)  kernel<<<...>>>(...); put
//       parentheses around a kernel with template arguments
//   TT_DYN_SMEM(T, name)      T* name: the block's dynamic shared memory
//   TT_SHARED(T, name, count) T name[count] in shared memory, uninitialised
//   TT_UNROLL                 before a loop
#pragma once

#ifdef TT_CUDA_EMULATION
#include "cuda_emulation.h"  // tests/csrc
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define TT_LAUNCH(kernel, grid, block, dynamic_bytes, stream, ...) \
  kernel<<<grid, block, dynamic_bytes, stream>>>(__VA_ARGS__)
#define TT_DYN_SMEM(T, name)                                          \
  extern __shared__ __align__(16) unsigned char tt_dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(tt_dynamic_shared)
#define TT_SHARED(T, name, count) __shared__ __align__(16) T name[count]
#define TT_UNROLL _Pragma("unroll")
#endif
