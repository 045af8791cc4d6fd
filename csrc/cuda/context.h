// What every CUDA operator does around its launches: checks, the device and its stream, memory.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../checks.h"
#include "../stable.h"
#ifndef TT_CUDA_EMULATION
#include <torch/csrc/stable/accelerator.h>
#endif

#include "plan.h"

namespace torchrec_tt::cuda {

// Where the operators' tensors lie, and the dispatcher's key for it.
#ifdef TT_CUDA_EMULATION
#define TT_CUDA_KEY CPU
using DeviceGuard = int32_t;
#else
#define TT_CUDA_KEY CUDA
using torch::stable::accelerator::DeviceGuard;
#endif

// The compute capabilities that the build has code for, as 80, 90, ...; "" without CUDA.
std::string architectures();

// The faults and warnings of a device, one of each, in memory of the host.
struct Faults {
  FaultRecord* fault;
  FaultRecord* warning;
};

// Of a device that has run an operator.
Faults faults_of(int32_t device);

// Takes a record, if there is one, and says what was wrong; "" if there is none.
std::string take(FaultRecord* record);

// One operator's call. It makes the tensors' device the current one and works on its current stream;
// memory comes from torch's allocator and goes back when the call ends, for what comes later on the
// same stream.
class Context {
 public:
  // Raises what an earlier batch on the device of `tensor` did wrong, or that the build has no code
  // for it.
  Context(const Tensor& tensor, const char* name);

  cudaStream_t stream() const { return stream_; }
  const Faults& faults() const { return faults_; }

  // Checks that a tensor is contiguous, on this device and of one of the types; returns its data.
  void check(const Tensor& tensor, const std::string& name) const;
  Tensor empty(const std::vector<int64_t>& sizes, ScalarType type) const;
  Tensor zeros(const std::vector<int64_t>& sizes, ScalarType type) const;
  void* workspace(int64_t bytes);

  // Raises if a launch was refused.
  void check_launches() const;

 private:
  Tensor first_;
  const char* name_;
  int32_t device_;
  std::optional<DeviceGuard> guard_;
  cudaStream_t stream_ = nullptr;
  Faults faults_;
  std::vector<Tensor> memory_;
};

}  // namespace torchrec_tt::cuda
