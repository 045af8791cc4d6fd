// The optimizers' steps on core gradients; csrc/cpu/update.h has the formulas.
#include <cmath>

#include "step.cuh"

namespace torchrec_tt::cuda {
namespace {

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

// Adds the slice's mean square to its sum; returns lr / (sqrt(sum) + eps) to every thread.
__device__ float rowwise_scale(const Settings& o, const CoreStep& c, int64_t slice, float* sums) {
  float squares = 0;
  for (int64_t e = threadIdx.x; e < c.slice_size; e += kThreads) {
    const int64_t at = slice * c.slice_size + e;
    const float weight = o.is_coupled ? load_element(c.weight, c.storage, at) : 0.0f;
    const float g = decayed(o, c.grad[at], weight);
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
      const float before = load_element(c.weight, c.storage, at);
      const float weight = stepped(o, s, at, before, decayed(o, c.grad[at], before), scale);
      store_element(c.weight, c.storage, at, weight, c.is_stochastic, s.rounding_key, at);
    }
  }
}

}  // namespace

void launch_count_steps(SteppedCore* cores, int num_cores, const StepSettings& settings,
                        cudaStream_t stream) {
  TT_LAUNCH(count_steps, static_cast<unsigned>((num_cores + kThreads - 1) / kThreads), kThreads, 0,
            stream, cores, num_cores, settings.learning_rate, settings.beta1, settings.beta2);
}

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
  launch_count_steps(on_device, num_cores, settings, stream);
  TT_LAUNCH(step_slices, blocks_for(settings.device, slices), kThreads, 0, stream, on_device,
            num_cores, slices, narrowed(settings));
  check_cuda(cudaGetLastError());
}

}  // namespace torchrec_tt::cuda
