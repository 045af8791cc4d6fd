// The arithmetic limit of a processor core: multiply-adds of registers alone.
#pragma once

#include "kernels.h"
#include "microkernels.h"

namespace torchrec_tt::TT_ISA {

template <typename T>
static T multiply_adds(int64_t rounds) {
  const Vec<T> factor = Vec<T>{} + T(0.5), term = Vec<T>{} + T(0.25);
  Vec<T> sum[kSumsOfPeak];  // all different, or the compiler would keep one
  TT_UNROLL for (int i = 0; i < kSumsOfPeak; i++) {
    sum[i] = Vec<T>{} + static_cast<T>(rounds % (i + 2));
  }
  for (int64_t round = 0; round < rounds; round++) {
    TT_UNROLL for (int i = 0; i < kSumsOfPeak; i++) sum[i] = sum[i] * factor + term;
  }
  T total = 0;
  TT_UNROLL for (int i = 0; i < kSumsOfPeak; i++) total += sum_lanes<T>(sum[i]);
  return total;
}

}  // namespace torchrec_tt::TT_ISA
