// One warp's tensor-core product, 16 x 8, of factors rounded to TF32 or BF16: C += A B.
//
// Lane l, with g = l / 4 and t = l % 4, holds (PTX ISA, "Matrix fragments for mma"):
//   C        (g, 2t) (g, 2t + 1) (g + 8, 2t) (g + 8, 2t + 1)
//   TF32, k of 8:   A (g, t) (g + 8, t) (g, t + 4) (g + 8, t + 4);  B (t, g) (t + 4, g)
//   BF16, k of 16:  the same with pairs: t stands for 2t and 2t + 1, t + 4 for 2t + 8 and 2t + 9
#pragma once

#include "launchers.h"

namespace torchrec_tt::cuda {

template <Precision kPrecision>
constexpr int kMmaDepth = kPrecision == Precision::kTF32 ? 8 : 16;

// Elements k and k + 1 (BF16) or k (TF32) of a factor as one register.
template <Precision kPrecision>
__device__ inline uint32_t mma_register(const float* at, int step) {
  if constexpr (kPrecision == Precision::kBFloat16) {
    const uint32_t low = __bfloat16_as_ushort(__float2bfloat16_rn(at[0]));
    const uint32_t high = __bfloat16_as_ushort(__float2bfloat16_rn(at[step]));
    return high << 16 | low;
  } else {
#ifdef TT_CUDA_EMULATION
    return (__float_as_uint(*at) + 0x1000u) & 0xffffe000u;
#else
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(*at));
    return bits;
#endif
  }
}

#ifdef TT_CUDA_EMULATION
struct MmaFactors {
  uint32_t a[4], b[2];
};

// Factor `k` of a fragment's register: TF32 has one, BF16 two.
template <Precision kPrecision>
float mma_factor(uint32_t bits, int k) {
  if (kPrecision == Precision::kTF32) return __uint_as_float(bits);
  return __uint_as_float((k & 1 ? bits >> 16 : bits & 0xffff) << 16);
}

template <Precision kPrecision>
void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  MmaFactors own;
  for (int i = 0; i < 4; i++) own.a[i] = a[i];
  for (int i = 0; i < 2; i++) own.b[i] = b[i];
  const auto lanes = cuda_emulation::exchange(~0u, own);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kPairs = kMmaDepth<kPrecision> / 8;  // elements of a register
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < kMmaDepth<kPrecision>; k++) {
      const int t = k / kPairs % 4, half = k / kPairs / 4;
      const MmaFactors left = lanes(row % 8 * 4 + t), right = lanes(column * 4 + t);
      c[i] += mma_factor<kPrecision>(left.a[row / 8 + 2 * half], k) *
              mma_factor<kPrecision>(right.b[half], k);
    }
  }
}
#else
// Volatile: all lanes must come to it together, so it may not sink into a branch that some take.
template <Precision kPrecision>
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kPrecision == Precision::kTF32) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}
#endif

}  // namespace torchrec_tt::cuda
