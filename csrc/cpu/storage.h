// Cores of 16 and 8 bits: widened to float where they are read; those of 16 rounded where they are
// stepped.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels.h"
#include "microkernels.h"

namespace torchrec_tt::TT_ISA {

TT_INLINE float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
TT_INLINE uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

TT_INLINE float from_bfloat16(uint32_t h) { return as_float(h << 16); }

// 112 is the difference of the exponents' biases, 2^-14 the smallest normal float16.
TT_INLINE float from_float16(uint32_t h) {
  const uint32_t magnitude = (h & 0x7fff) << 13, exponent = magnitude & 0x0f800000;
  uint32_t bits = magnitude + (112u << 23);
  bits = exponent == 0x0f800000 ? bits + (112u << 23) : bits;  // infinity, NaN
  const float subnormal = as_float(magnitude + (113u << 23)) - as_float(113u << 23);
  bits = exponent == 0 ? as_bits(subnormal) : bits;
  return as_float(bits | (h & 0x8000) << 16);
}

// The n elements at `at` of a core: in place, or widened into `scratch`.
template <typename T>
TT_INLINE const T* elements(const void* core, Storage storage, int64_t at, int64_t n, T* scratch) {
  if (storage == Storage::kNative) return static_cast<const T*>(core) + at;
  if constexpr (std::is_same_v<T, float>) {
    const uint16_t* from = static_cast<const uint16_t*>(core) + at;
    if (storage == Storage::kBFloat16) {
      for (int64_t i = 0; i < n; i++) scratch[i] = from_bfloat16(from[i]);
    } else {
      for (int64_t i = 0; i < n; i++) scratch[i] = from_float16(from[i]);
    }
  }
  return scratch;
}

// The `size` elements of a core's slice: in place, or widened into `scratch`.
template <typename T>
TT_INLINE const T* slice_elements(const void* core, Storage storage, int64_t slice, int64_t size,
                                  T* scratch) {
  if (storage != Storage::kInt8) return elements(core, storage, slice * size, size, scratch);
  const int8_t* from = static_cast<const int8_t*>(core) + slice * (size + kScaleBytes);
  float scale;
  std::memcpy(&scale, from + size, kScaleBytes);
  for (int64_t i = 0; i < size; i++) scratch[i] = scale * static_cast<float>(from[i]);
  return scratch;
}

// What rounds an element: its own random bits, or none (to nearest, ties to even).
struct Rounding {
  bool is_stochastic;
  uint32_t low, high;  // of the key of (table, core, step)

  Rounding(bool stochastic, uint64_t key)
      : is_stochastic(stochastic), low(static_cast<uint32_t>(key)),
        high(static_cast<uint32_t>(key >> 32)) {}

  // 32 bits from an element's place: Wellons' `lowbias32` with the key's halves mixed in.
  TT_INLINE uint32_t random(uint32_t low, uint32_t high, uint32_t element) {
    uint32_t x = element ^ low;
    x ^= x >> 16;
    x *= 0x7feb352d;
    x ^= x >> 15;
    x += high;
    x *= 0x846ca68b;
    return x ^ x >> 16;
  }
};

template <bool kStochastic>
TT_INLINE uint16_t to_bfloat16(float value, uint32_t random) {
  const uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffff;
  const uint32_t up = kStochastic ? random & 0xffff : 0x7fff + (bits >> 16 & 1);
  const uint32_t finite = (bits + up) >> 16;
  const uint32_t rest = bits >> 16 | (magnitude > 0x7f800000 ? 0x40 : 0);  // infinity, NaN
  return static_cast<uint16_t>(magnitude < 0x7f800000 ? finite : rest);
}

template <bool kStochastic>
TT_INLINE uint16_t to_float16(float value, uint32_t random) {
  const uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffff;
  const uint32_t up = kStochastic ? random & 0x1fff : 0xfff + (magnitude >> 13 & 1);
  const uint32_t rounded = magnitude + up;
  uint32_t half = (rounded - (112u << 23)) >> 13;
  half = rounded >= 0x47800000 ? 0x7c00 : half;  // 65536 and more: infinity
  // Subnormal: in units of 2^-24. Thirteen random bits leave whole numbers as they are.
  const float units = as_float(magnitude) * 0x1p24f;
  const uint32_t down = static_cast<uint32_t>(
      static_cast<int32_t>(units + static_cast<float>(static_cast<int32_t>(up)) * 0x1p-13f));
  const uint32_t nearest = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
  half = magnitude < (113u << 23) ? (kStochastic ? down : nearest) : half;
  half = magnitude > 0x7f800000 ? 0x7e00 : half;
  return static_cast<uint16_t>(half | (bits >> 16 & 0x8000));
}

template <bool kStochastic, bool kBFloat16>
static void round_elements(const float* from, const Rounding& rounding, int64_t at, int64_t n,
                           uint16_t* to) {
  const uint32_t low = rounding.low;
  const uint32_t high = rounding.high + static_cast<uint32_t>(at >> 32) * 0x9e3779b9;
  const uint32_t first = static_cast<uint32_t>(at);
  for (int64_t i = 0; i < n; i++) {
    const uint32_t random =
        kStochastic ? Rounding::random(low, high, first + static_cast<uint32_t>(i)) : 0;
    to[i] = kBFloat16 ? to_bfloat16<kStochastic>(from[i], random)
                      : to_float16<kStochastic>(from[i], random);
  }
}

// Puts back the n elements at `at` of a 16-bit core, rounded as those at `at + shift`.
TT_INLINE void store_rounded(const float* from, Storage storage, const Rounding& rounding,
                             int64_t at, int64_t shift, int64_t n, void* core) {
  uint16_t* to = static_cast<uint16_t*>(core) + at;
  at += shift;
  if (storage == Storage::kBFloat16) {
    rounding.is_stochastic ? round_elements<true, true>(from, rounding, at, n, to)
                           : round_elements<false, true>(from, rounding, at, n, to);
  } else {
    rounding.is_stochastic ? round_elements<true, false>(from, rounding, at, n, to)
                           : round_elements<false, false>(from, rounding, at, n, to);
  }
}

}  // namespace torchrec_tt::TT_ISA
