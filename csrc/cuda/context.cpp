#include "context.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>

#ifndef TT_CUDA_EMULATION
// In libtorch_cuda alone: null in a torch without CUDA, where this library loads as well.
extern "C" __attribute__((weak)) int32_t aoti_torch_get_current_cuda_stream(int32_t, void**);
#endif

namespace torchrec_tt::cuda {
namespace {

constexpr int kMaxDevices = 64;

void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

#ifdef TT_CUDA_EMULATION
bool is_here(const Tensor& tensor) { return tensor.is_cpu(); }
cudaStream_t current_stream(int32_t) { return nullptr; }
int32_t index_of(const Tensor&) { return 0; }
#else
bool is_here(const Tensor& tensor) { return tensor.is_cuda(); }
int32_t index_of(const Tensor& tensor) { return tensor.get_device_index(); }
cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  if (!aoti_torch_get_current_cuda_stream ||
      aoti_torch_get_current_cuda_stream(device, &stream) != 0) {
    throw std::runtime_error("torch has no CUDA stream for device " + std::to_string(device));
  }
  return static_cast<cudaStream_t>(stream);
}
#endif

// Once for a device: that it runs our code, and memory for its faults.
Faults prepare(int32_t device) {
  const cudaError_t error = probe_device();
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess) {
    cudaGetLastError();  // else the next launch seems to have failed
    throw std::runtime_error("the device must have one of the compute capabilities " +
                             architectures() + " that torchrec_tt was built for, got " +
                             std::to_string(major) + std::to_string(minor) + " (device " +
                             std::to_string(device) + ", " + cudaGetErrorString(error) + ")");
  }
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, 2 * sizeof(FaultRecord),
                           cudaHostAllocMapped | cudaHostAllocPortable),
             "the first operator on a device needs pinned memory (and no capture under way)");
  std::memset(memory, 0, 2 * sizeof(FaultRecord));
  auto* records = static_cast<FaultRecord*>(memory);
  return {records, records + 1};
}

std::mutex mutex;
Faults of_device[kMaxDevices] = {};

}  // namespace

Faults faults_of(int32_t device) {
  TT_CHECK(device >= 0 && device < kMaxDevices, "device must be in [0, ", kMaxDevices, "), got ",
           device);
  const std::lock_guard lock(mutex);
  if (!of_device[device].fault) of_device[device] = prepare(device);
  return of_device[device];
}

std::string take(FaultRecord* record) {
  const std::lock_guard lock(mutex);
  const std::atomic_ref<int64_t> what(record->fault);  // the device writes it last
  const auto fault = static_cast<Fault>(what.load(std::memory_order_acquire));
  if (fault == Fault::kNone || fault == Fault::kWriting) return "";
  const FaultRecord* r = record;
  std::ostringstream text;
  if (fault == Fault::kBadId) {
    text << "indices must be in [0, " << r->limit << ") for the lookup's table number " << r->table
         << ", got " << r->value << " at position " << r->at << " (feature " << r->feature << ")";
  } else if (fault == Fault::kOffsetsStart) {
    text << "offsets must start at 0, got " << r->value;
  } else if (fault == Fault::kOffsetsDecrease) {
    text << "offsets must not decrease, got " << r->limit << " then " << r->value
         << " at position " << r->at;
  } else {
    text << "offsets must end at the number of indices, " << r->limit << ", got " << r->value;
  }
  text << ", in an earlier batch on this device";
  // The rest is the device's to write from here on.
  what.store(static_cast<int64_t>(Fault::kNone), std::memory_order_release);
  return text.str();
}

Context::Context(const Tensor& tensor, const char* name) : first_(tensor), name_(name) {
  TT_CHECK(is_here(tensor), name, " must be on a CUDA device like the other tensors");
  device_ = index_of(tensor);
  guard_.emplace(device_);
  faults_ = faults_of(device_);
  const std::string fault = take(faults_.fault);
  TT_CHECK(fault.empty(), fault);
  stream_ = current_stream(device_);
}

void Context::check(const Tensor& tensor, const std::string& name) const {
  TT_CHECK(is_here(tensor) && index_of(tensor) == device_, name, " must be on the device of ",
           name_, ", number ", device_, ", got ",
           is_here(tensor) ? "number " + std::to_string(index_of(tensor)) : "none of CUDA");
  TT_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

Tensor Context::empty(const std::vector<int64_t>& sizes, ScalarType type) const {
  return torch::stable::new_empty(first_, sizes, type);
}

Tensor Context::zeros(const std::vector<int64_t>& sizes, ScalarType type) const {
  return torch::stable::new_zeros(first_, sizes, type);
}

void* Context::workspace(int64_t bytes) {
  memory_.push_back(empty({bytes + 255}, ScalarType::Byte));
  const auto at = reinterpret_cast<uintptr_t>(memory_.back().mutable_data_ptr());
  return reinterpret_cast<void*>((at + 255) / 256 * 256);
}

void Context::check_launches() const { check_cuda(cudaGetLastError(), "a CUDA kernel failed"); }

std::string architectures() { return TT_CUDA_ARCHITECTURES; }

}  // namespace torchrec_tt::cuda
