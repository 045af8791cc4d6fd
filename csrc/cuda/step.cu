// The optimizers' steps on core gradients; csrc/cpu/update.h has the formulas.
#include <cmath>

#include "call_memory.h"
#include "storage.cuh"

namespace torchrec_tt::cuda {
namespace {

// A core, and what follows from its step.
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

// A splitmix64 round: keys of neighbouring steps have nothing in common.
__device__ uint64_t rounding_key(int64_t seed, int64_t step) {
  uint64_t x = static_cast<uint64_t>(seed) + static_cast<uint64_t>(step) * 0x9e3779b97f4a7c15ULL;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ x >> 27) * 0x94d049bb133111ebULL;
  return x ^ x >> 31;
}

// One thread a core.
__global__ void __launch_bounds__(kThreads)
    count_steps(SteppedCore* cores, int num_cores, double learning_rate, double beta1, double beta2) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= num_cores || !cores[i].core.step) return;
  SteppedCore& c = cores[i];
  const int64_t step = ++*c.core.step;
  c.rounding_key = rounding_key(c.core.rounding_seed, step);
  c.step_size = static_cast<float>(learning_rate / (1 - pow(beta1, static_cast<double>(step))));
  c.bias2_sqrt = static_cast<float>(sqrt(1 - pow(beta2, static_cast<double>(step))));
}

__device__ float gradient(const Settings& o, const CoreStep& c, int64_t at, float weight) {
  return o.is_coupled ? c.grad[at] + o.weight_decay * weight : c.grad[at];
}

// Adds the slice's mean square to its sum; returns lr / (sqrt(sum) + eps) to every thread.
__device__ float rowwise_scale(const Settings& o, const CoreStep& c, int64_t slice, float* sums) {
  float squares = 0;
  for (int64_t e = threadIdx.x; e < c.slice_size; e += kThreads) {
    const int64_t at = slice * c.slice_size + e;
    const float weight = o.is_coupled ? load_element(c.weight, c.storage, at) : 0.0f;
    const float g = gradient(o, c, at, weight);
    squares += g * g;
  }
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kWarps; w++) squares += sums[w];
    const float sum = c.moment1[slice] + squares / static_cast<float>(c.slice_size);
    c.moment1[slice] = sum;
    sums[kWarps] = o.learning_rate / (sqrtf(sum) + o.eps);
  }
  __syncthreads();
  return sums[kWarps];
}

// The element at `at` after the step; `scale` is rowwise_adagrad's, or the learning rate.
__device__ float stepped(const Settings& o, const SteppedCore& s, int64_t at, float weight,
                         float scale) {
  const CoreStep& c = s.core;
  const float g = gradient(o, c, at, weight);
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

// One block a slice, one thread an element.
__global__ void __launch_bounds__(kThreads, kManyBlocks)
    step_slices(const SteppedCore* cores, int num_cores, int64_t num_slices, Settings o) {
  TT_SHARED(float, sums, kWarps + 1);
  for (int64_t i = blockIdx.x; i < num_slices; i += gridDim.x) {
    int low = 0, high = num_cores - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (cores[middle].first_slice <= i) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const SteppedCore& s = cores[low];
    const CoreStep& c = s.core;
    const int64_t slice = i - s.first_slice;
    if (c.touched && !c.touched[slice]) continue;
    const float scale = o.optimizer == Optimizer::kRowwiseAdagrad ? rowwise_scale(o, c, slice, sums)
                                                                  : o.learning_rate;
    for (int64_t e = threadIdx.x; e < c.slice_size; e += kThreads) {
      const int64_t at = slice * c.slice_size + e;
      const float weight = stepped(o, s, at, load_element(c.weight, c.storage, at), scale);
      store_element(c.weight, c.storage, at, weight, c.is_stochastic, s.rounding_key);
    }
  }
}

}  // namespace

int64_t step_workspace_bytes(const std::vector<CoreStep>& cores) {
  Workspace workspace;
  workspace.take<SteppedCore>(static_cast<int64_t>(cores.size()));
  return workspace.bytes;
}

void launch_step(const std::vector<CoreStep>& cores, const StepSettings& settings, void* workspace,
                 cudaStream_t stream) {
  std::vector<SteppedCore> stepped_cores;
  int64_t slices = 0;
  for (const CoreStep& core : cores) {
    stepped_cores.push_back({core, slices, 0, 1, 0});
    slices += core.num_slices;
  }
  const int num_cores = static_cast<int>(cores.size());
  auto* on_device = static_cast<SteppedCore*>(workspace);
  launch_upload(stepped_cores.data(), num_cores * static_cast<int64_t>(sizeof(SteppedCore)), on_device,
                stream);
  TT_LAUNCH(count_steps, static_cast<unsigned>((num_cores + kThreads - 1) / kThreads), kThreads, 0,
            stream, on_device, num_cores, settings.learning_rate, settings.beta1, settings.beta2);
  const bool decays = settings.weight_decay != 0, is_decoupled = settings.decoupled_weight_decay;
  const auto narrow = [](double value) { return static_cast<float>(value); };
  const Settings o{settings.optimizer,
                   narrow(settings.learning_rate),
                   narrow(settings.eps),
                   narrow(settings.beta1),
                   narrow(settings.beta2),
                   narrow(settings.weight_decay),
                   decays && !is_decoupled,
                   decays && is_decoupled};
  const int64_t most = 16 * int64_t{std::max(settings.device.num_multiprocessors, 1)};
  TT_LAUNCH(step_slices, static_cast<unsigned>(std::clamp<int64_t>(slices, 1, most)), kThreads, 0,
            stream, on_device, num_cores, slices, o);
  check_cuda(cudaGetLastError());
}

}  // namespace torchrec_tt::cuda
