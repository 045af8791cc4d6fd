// The optimizer's settings and states of one call, checked, as the launchers take them.
#pragma once

#include "lookup_call.h"

namespace torchrec_tt::cuda {

// The optimizer's settings, and its states as csrc/cpu/optimizer.h orders them.
struct Step {
  StepSettings settings;
  std::vector<CoreStep> cores;

  Step(const Context& context, const std::string& optimizer, const StepSettings& given,
       const Tensors& weights, const Tensors& states, const Ints& rounding_seeds,
       const char* name = "core")
      : settings(given) {
    settings.optimizer = optimizer_of(optimizer);
    settings.device = current_device();
    const bool is_stochastic = !rounding_seeds.empty();
    TT_CHECK(!is_stochastic || rounding_seeds.size() == weights.size(),
             "rounding_seeds must have ", weights.size(), " entries or none, got ",
             rounding_seeds.size());
    const bool is_adam = settings.optimizer == Optimizer::kAdam;
    const int moments = settings.optimizer == Optimizer::kSgd ? 0 : is_adam ? 2 : 1;
    const bool has_step = is_adam || is_stochastic;
    const size_t per_core = moments + has_step;
    TT_CHECK(states.size() == per_core * weights.size(), "states must have ",
             per_core * weights.size(), " tensors for ", optimizer, ", got ", states.size());
    if (weights.empty()) return;
    const Storage storage = storage_of(weights[0], name);
    for (size_t i = 0; i < weights.size(); i++) {
      const Tensor& weight = weights[i];
      CoreStep core{};
      core.weight = data<void>(context, weight, weights[0].scalar_type(), weight.numel(),
                               nth(name, i));
      TT_CHECK(weight.dim() == 2 && weight.numel() > 0, name,
               " must be matrices, not empty, number ", i, " is not");
      core.num_slices = weight.size(0);
      core.slice_size = weight.size(1);
      core.storage = storage;
      core.is_stochastic = is_stochastic;
      core.rounding_seed = is_stochastic ? rounding_seeds[i] : 0;
      const int64_t size =
          settings.optimizer == Optimizer::kRowwiseAdagrad ? core.num_slices : weight.numel();
      const auto state = [&](size_t k) {
        const size_t at = i * per_core + k;
        return data<float>(context, states[at], ScalarType::Float, size, nth("state", at));
      };
      if (moments > 0) core.moment1 = state(0);
      if (moments > 1) core.moment2 = state(1);
      if (has_step) {
        const size_t at = i * per_core + moments;
        core.step = data<int64_t>(context, states[at], ScalarType::Long, 1, nth("state", at));
      }
      cores.push_back(core);
    }
  }

  static Optimizer optimizer_of(const std::string& name) {
    if (name == "sgd") return Optimizer::kSgd;
    if (name == "adagrad") return Optimizer::kAdagrad;
    if (name == "rowwise_adagrad") return Optimizer::kRowwiseAdagrad;
    TT_CHECK(name == "adam", "optimizer must be sgd, adagrad, rowwise_adagrad or adam, got ", name);
    return Optimizer::kAdam;
  }

  void launch(Context& context) const {
    launch_step(cores, settings, context.workspace(step_workspace_bytes(cores)), context.stream());
    context.check_launches();
  }
};

}  // namespace torchrec_tt::cuda
