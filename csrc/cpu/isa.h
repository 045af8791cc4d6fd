// Chooses the kernels of the best instruction set that this processor has.
#pragma once

#include <cstdlib>
#include <string>
#include <type_traits>

#include "../checks.h"
#include "kernels.h"

namespace torchrec_tt {

inline std::string choose_isa() {
  const char* forced = std::getenv("TORCHREC_TT_ISA");
  const std::string wanted = forced ? forced : "";
  TT_CHECK(wanted.empty() || wanted == "generic" || wanted == "avx2" || wanted == "avx512",
           "TORCHREC_TT_ISA must be generic, avx2 or avx512, got ", wanted);
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
#else
  const bool has_avx2 = false, has_avx512 = false;
#endif
  TT_CHECK((wanted != "avx2" || has_avx2) && (wanted != "avx512" || has_avx512),
           "TORCHREC_TT_ISA must be an instruction set of this processor, got ", wanted);
  if (!wanted.empty()) return wanted;
  return has_avx512 ? "avx512" : has_avx2 ? "avx2" : "generic";
}

inline const std::string& isa() {
  static const std::string chosen = choose_isa();
  return chosen;
}

template <typename T>
const Kernels<T>& kernels() {
  if constexpr (std::is_same_v<T, double>) {
    return kGenericDouble;
  } else {
#if defined(__x86_64__)
    if (isa() == "avx512") return kAvx512Float;
    if (isa() == "avx2") return kAvx2Float;
#endif
    return kGenericFloat;
  }
}

}  // namespace torchrec_tt
