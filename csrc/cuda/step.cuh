// One element's step by the optimizers, of core slices and of cached rows; csrc/cpu/update.h has the
// formulas.
#pragma once

#include "call_memory.h"
#include "storage.cuh"

namespace torchrec_tt::cuda {

// A core or a table's cached rows, and what follows from its step.
struct SteppedCore {
  CoreStep core;
  int64_t first_slice;  // among those of all cores
  float step_size, bias2_sqrt;  // adam: lr / (1 - b1^t), sqrt(1 - b2^t)
  uint64_t rounding_key;        // of the table, the core and the step
};

struct Settings {
  Optimizer optimizer;
  float learning_rate, eps, beta1, beta2, weight_decay;
  int is_coupled, is_decoupled;
};

inline Settings narrowed(const StepSettings& from) {
  const bool decays = from.weight_decay != 0, is_decoupled = from.decoupled_weight_decay;
  const auto narrow = [](double value) { return static_cast<float>(value); };
  return {from.optimizer,       narrow(from.learning_rate), narrow(from.eps),
          narrow(from.beta1),   narrow(from.beta2),         narrow(from.weight_decay),
          decays && !is_decoupled, decays && is_decoupled};
}

// Counts the steps of the cores that do, and what follows from them.
void launch_count_steps(SteppedCore* cores, int num_cores, const StepSettings& settings,
                        cudaStream_t stream);

__device__ inline float decayed(const Settings& o, float grad, float weight) {
  return o.is_coupled ? grad + o.weight_decay * weight : grad;
}

// The element at `at` after the step on its gradient g, decayed; `scale` is rowwise_adagrad's, or the
// learning rate.
__device__ inline float stepped(const Settings& o, const SteppedCore& s, int64_t at, float weight,
                                float g, float scale) {
  const CoreStep& c = s.core;
  if (o.is_decoupled) weight *= 1 - o.learning_rate * o.weight_decay;
  if (o.optimizer == Optimizer::kSgd || o.optimizer == Optimizer::kRowwiseAdagrad) {
    return weight - scale * g;
  }
  if (o.optimizer == Optimizer::kAdagrad) {
    const float sum = c.moment1[at] + g * g;
    c.moment1[at] = sum;
    return weight - o.learning_rate * g / (sqrtf(sum) + o.eps);
  }
  const float mean = c.moment1[at] + (1 - o.beta1) * (g - c.moment1[at]);
  const float square = o.beta2 * c.moment2[at] + (1 - o.beta2) * g * g;
  c.moment1[at] = mean;
  c.moment2[at] = square;
  return weight - s.step_size * mean / (sqrtf(square) / s.bias2_sqrt + o.eps);
}

}  // namespace torchrec_tt::cuda
