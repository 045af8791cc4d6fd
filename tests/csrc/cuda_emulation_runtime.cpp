// The CUDA runtime's functions that launchers call, and what emulation.py calls.
#include "cuda_emulation_state.h"

using cuda_emulation::machine;

constexpr cudaError_t kEmulationError = 719;  // cudaErrorLaunchFailure
cudaError_t cudaPeekAtLastError() { return machine.error.empty() ? cudaSuccess : kEmulationError; }
cudaError_t cudaGetLastError() {
  if (machine.error.empty()) return cudaSuccess;
  machine.text = std::exchange(machine.error, "");
  return kEmulationError;
}
const char* cudaGetErrorString(cudaError_t error) {
  if (error == kEmulationError) return machine.text.c_str();
  return error == cudaSuccess ? "no error" : "invalid argument";
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? machine.shared_limit
           : attribute == cudaDevAttrMultiProcessorCount        ? 4
           : attribute == cudaDevAttrComputeCapabilityMajor     ? 9
                                                                : 0;
  return cudaSuccess;
}
cudaError_t cuda_emulation_cub_error() {
  const bool fails = machine.cub_calls_to_failure > 0 && --machine.cub_calls_to_failure == 0;
  return fails ? cudaErrorInvalidValue : cudaSuccess;
}
cudaError_t cuda_emulation_set_attribute(const void* kernel, cudaFuncAttribute, int value) {
  if (value > machine.shared_limit) return cudaErrorInvalidValue;
  machine.allowed_bytes[kernel] = value;
  return cudaSuccess;
}

// What emulation.py calls.
extern "C" {
int emulation_num_launches() { return machine.num_launches; }
void emulation_set_schedule(int seed) { machine.seed = seed; }
void emulation_set_shared_limit(int bytes) { machine.shared_limit = bytes; }
void emulation_fail_cub_call(int number) { machine.cub_calls_to_failure = number; }
void emulation_disable_barrier(int site) { machine.disabled_site = site; }
int emulation_num_barriers() { return static_cast<int>(machine.sites.size()); }
const char* emulation_barrier(int site) { return machine.sites[site].c_str(); }
const char* emulation_take_error() {
  return cudaGetLastError() == cudaSuccess ? nullptr : machine.text.c_str();
}
}
