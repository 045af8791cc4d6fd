#include "optimizer.h"

#include <algorithm>
#include <cmath>

#include "../checks.h"
#include "call.h"

namespace torchrec_tt {
namespace {

Optimizer optimizer_of(const std::string& name) {
  if (name == "sgd") return Optimizer::kSgd;
  if (name == "adagrad") return Optimizer::kAdagrad;
  if (name == "rowwise_adagrad") return Optimizer::kRowwiseAdagrad;
  TT_CHECK(name == "adam", "optimizer must be sgd, adagrad, rowwise_adagrad or adam, got ", name);
  return Optimizer::kAdam;
}

int num_moments(Optimizer optimizer) {
  return optimizer == Optimizer::kSgd ? 0 : optimizer == Optimizer::kAdam ? 2 : 1;
}

// A splitmix64 round: keys of neighbouring steps have nothing in common.
uint64_t rounding_key(int64_t seed, int64_t step) {
  uint64_t x = static_cast<uint64_t>(seed) + static_cast<uint64_t>(step) * 0x9e3779b97f4a7c15ULL;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ x >> 27) * 0x94d049bb133111ebULL;
  return x ^ x >> 31;
}

template <typename T>
T* moment(const Tensor& state, int64_t size, size_t index) {
  TT_CHECK(state.is_cpu() && state.is_contiguous() && state.numel() == size &&
               is_type(state, kScalarType<T>),
           "states must be contiguous, on the CPU, ", kScalarType<T>, " and of ", size,
           " elements, state ", index, " is not");
  return static_cast<T*>(state.mutable_data_ptr());
}

}  // namespace

template <typename T>
std::vector<CoreUpdate<T>> OptimizerSettings::updates(const std::vector<Tensor>& cores,
                                                      const std::vector<Tensor>& states) const {
  const Optimizer optimizer = optimizer_of(name);
  const bool is_stochastic = !rounding_seeds.empty();
  TT_CHECK(!is_stochastic || rounding_seeds.size() == cores.size(), "rounding_seeds must have ",
           cores.size(), " entries or none, got ", rounding_seeds.size());
  const int moments = num_moments(optimizer);
  const bool has_step = optimizer == Optimizer::kAdam || is_stochastic;
  const size_t per_core = moments + has_step;
  TT_CHECK(states.size() == per_core * cores.size(), "states must have ", per_core * cores.size(),
           " tensors for ", name, ", got ", states.size());
  std::vector<CoreUpdate<T>> result(cores.size());
  for (size_t i = 0; i < cores.size(); i++) {
    CoreUpdate<T>& u = result[i];
    const int64_t size = optimizer == Optimizer::kRowwiseAdagrad ? cores[i].size(0)
                                                                  : cores[i].numel();
    if (moments > 0) u.moment1 = moment<T>(states[i * per_core], size, i * per_core);
    if (moments > 1) u.moment2 = moment<T>(states[i * per_core + 1], size, i * per_core + 1);
    u.optimizer = optimizer;
    u.learning_rate = static_cast<T>(learning_rate);
    u.eps = static_cast<T>(eps);
    u.beta1 = static_cast<T>(beta1);
    u.beta2 = static_cast<T>(beta2);
    u.weight_decay = static_cast<T>(weight_decay);
    u.decoupled_weight_decay = decoupled_weight_decay && weight_decay != 0;
    u.weight = cores[i].mutable_data_ptr();
    u.storage = storage_of<T>(cores[i]);
    u.is_stochastic = is_stochastic;
  }
  // Nothing raises once the first step is counted.
  for (size_t at = moments; has_step && at < states.size(); at += per_core) {
    TT_CHECK(states[at].is_cpu() && states[at].numel() == 1 &&
                 is_type(states[at], ScalarType::Long),
             "states must have a step of one int64, state ", at, " is not");
  }
  for (size_t i = 0; has_step && i < cores.size(); i++) {
    CoreUpdate<T>& u = result[i];
    const Tensor& counter = states[i * per_core + moments];
    const int64_t step = ++*static_cast<int64_t*>(counter.mutable_data_ptr());
    if (is_stochastic) u.rounding_key = rounding_key(rounding_seeds[i], step);
    u.step_size = static_cast<T>(learning_rate / (1 - std::pow(beta1, step)));
    u.bias2_sqrt = static_cast<T>(std::sqrt(1 - std::pow(beta2, step)));
  }
  return result;
}

template std::vector<CoreUpdate<float>> OptimizerSettings::updates(
    const std::vector<Tensor>&, const std::vector<Tensor>&) const;
template std::vector<CoreUpdate<double>> OptimizerSettings::updates(
    const std::vector<Tensor>&, const std::vector<Tensor>&) const;

namespace {

constexpr int64_t kElementsPerJob = 1 << 15;

template <typename T>
void step_cores(const std::vector<Tensor>& cores, const std::vector<Tensor>& grads,
                const std::vector<CoreUpdate<T>>& updates) {
  struct Job {
    size_t core;
    int64_t begin, end;  // slices
  };
  std::vector<Job> jobs;
  for (size_t i = 0; i < cores.size(); i++) {
    const int64_t slices = cores[i].size(0);
    const int64_t at_once = std::max<int64_t>(1, kElementsPerJob / cores[i].size(1));
    for (int64_t s = 0; s < slices; s += at_once) {
      jobs.push_back({i, s, std::min(slices, s + at_once)});
    }
  }
  const Kernels<T>& k = kernels<T>();
  for_each_job<T>(jobs.size(), 0, [&](int64_t job, T*) {
    const Job& j = jobs[job];
    const int64_t size = cores[j.core].size(1);
    const T* grad = static_cast<const T*>(grads[j.core].const_data_ptr());
    for (int64_t s = j.begin; s < j.end; s++) {
      k.update(updates[j.core], s * size, grad + s * size, 1, size, size);
    }
  });
}

void step_cores_op(const std::vector<Tensor>& cores, const std::vector<Tensor>& grads,
                   const std::vector<Tensor>& states, std::string optimizer, double learning_rate,
                   double eps, double beta1, double beta2, double weight_decay,
                   bool decoupled_weight_decay, const std::vector<int64_t>& rounding_seeds) {
  const OptimizerSettings settings{std::move(optimizer), learning_rate, eps, beta1, beta2,
                                   weight_decay, decoupled_weight_decay, rounding_seeds};
  TT_CHECK(grads.size() == cores.size(), "grads must have one tensor per core, ", cores.size(),
           ", got ", grads.size());
  dispatch(cores, [&](auto zero) {
    using T = decltype(zero);
    for (size_t i = 0; i < cores.size(); i++) {
      TT_CHECK(cores[i].is_cpu() && cores[i].is_contiguous() && cores[i].dim() == 2 &&
                   cores[i].numel() > 0 && is_type(cores[i], cores[0].scalar_type()),
               "cores must be contiguous matrices on the CPU of one dtype, not empty, core ", i,
               " is not");
      TT_CHECK(grads[i].is_cpu() && grads[i].is_contiguous() &&
                   grads[i].numel() == cores[i].numel() && is_type(grads[i], kScalarType<T>),
               "grads must be contiguous, on the CPU, ", kScalarType<T>,
               " and of the cores' sizes, gradient ", i, " is not");
    }
    step_cores(cores, grads, settings.updates<T>(cores, states));
  });
}

}  // namespace
}  // namespace torchrec_tt

STABLE_TORCH_LIBRARY_IMPL(torchrec_tt, CPU, m) {
  m.impl("step_cores", TORCH_BOX(&torchrec_tt::step_cores_op));
}
