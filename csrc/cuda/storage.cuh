// Cores of 32 or 16 bits: widened to float where they are read, rounded where they are stepped, bit
// for bit as csrc/cpu/storage.h does it.
#pragma once

#include "launchers.h"

namespace torchrec_tt::cuda {

__device__ inline float load_element(const void* core, Storage storage, int64_t at) {
  if (storage == Storage::kFloat32) return static_cast<const float*>(core)[at];
  const unsigned short bits = static_cast<const unsigned short*>(core)[at];
  return storage == Storage::kBFloat16 ? __uint_as_float(static_cast<unsigned>(bits) << 16)
                                       : __half2float(__ushort_as_half(bits));
}

// 32 random bits of an element of the core and step that `key` stands for.
__device__ inline uint32_t rounding_bits(uint64_t key, int64_t element) {
  const uint32_t high = static_cast<uint32_t>(key >> 32) +
                        static_cast<uint32_t>(element >> 32) * 0x9e3779b9u;
  uint32_t x = static_cast<uint32_t>(element) ^ static_cast<uint32_t>(key);
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x += high;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

__device__ inline uint16_t to_bfloat16(float value, bool is_stochastic, uint32_t random) {
  const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  const uint32_t up = is_stochastic ? random & 0xffffu : 0x7fffu + (bits >> 16 & 1);
  const uint32_t rest = bits >> 16 | (magnitude > 0x7f800000u ? 0x40u : 0u);  // infinity, NaN
  return static_cast<uint16_t>(magnitude < 0x7f800000u ? (bits + up) >> 16 : rest);
}

// 112 is the difference of the exponents' biases, 2^-14 the smallest normal float16.
__device__ inline uint16_t to_float16(float value, bool is_stochastic, uint32_t random) {
  const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  const uint32_t up = is_stochastic ? random & 0x1fffu : 0xfffu + (magnitude >> 13 & 1);
  const uint32_t rounded = magnitude + up;
  uint32_t half = (rounded - (112u << 23)) >> 13;
  if (rounded >= 0x47800000u) half = 0x7c00u;  // 65536 and more: infinity
  if (magnitude < (113u << 23)) {              // subnormal: in units of 2^-24
    const float size = __uint_as_float(magnitude);
    half = is_stochastic ? static_cast<uint32_t>(static_cast<int32_t>(
                               size * 0x1p24f + static_cast<float>(up) * 0x1p-13f))
                         : __float_as_uint(size + 0.5f) - __float_as_uint(0.5f);
  }
  if (magnitude > 0x7f800000u) half = 0x7e00u;
  return static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

// Puts element `at` of a core back; `key` and `element` round it by chance where the core asks for
// that.
__device__ inline void store_element(void* core, Storage storage, int64_t at, float value,
                                     bool is_stochastic, uint64_t key, int64_t element) {
  if (storage == Storage::kFloat32) {
    static_cast<float*>(core)[at] = value;
    return;
  }
  const uint32_t random = is_stochastic ? rounding_bits(key, element) : 0;
  static_cast<uint16_t*>(core)[at] = storage == Storage::kBFloat16
                                         ? to_bfloat16(value, is_stochastic, random)
                                         : to_float16(value, is_stochastic, random);
}

}  // namespace torchrec_tt::cuda
