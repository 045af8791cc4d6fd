// An optimizer's settings and states as the operators take them, made into a CoreUpdate per core.
#pragma once

#include <string>
#include <vector>

#include "../stable.h"
#include "kernels.h"

namespace torchrec_tt {

// States of a core, in this order:
//   adagrad          sum like the core
//   rowwise_adagrad  sum [m_k]
//   adam             exp_avg and exp_avg_sq like the core
// and last, for adam and for stochastic rounding, step: int64 [1], counted up here.
// Sums are float32, float64 for float64 cores.
struct OptimizerSettings {
  std::string name;
  double learning_rate = 0, eps = 0, beta1 = 0, beta2 = 0, weight_decay = 0;
  bool decoupled_weight_decay = false;
  std::vector<int64_t> rounding_seeds;  // per core: of stochastic rounding; empty: to nearest

  // The update of every core; its step is counted.
  template <typename T>
  std::vector<CoreUpdate<T>> updates(const std::vector<Tensor>& cores,
                                     const std::vector<Tensor>& states) const;
};

}  // namespace torchrec_tt
