// The launcher of the plan (plan.cu), and the record of a batch's faults.
#pragma once

#include <cstdint>
#include <vector>

#include "../row_tags.h"
#include "../tt_shape.h"
#include "device.h"

namespace torchrec_tt::cuda {

// What is wrong with a batch.
enum class Fault : int64_t {
  kWriting = -1,     // by a kernel, see fault.cuh
  kNone,
  kBadId,            // at: place in indices; table, feature, value, limit: its number of rows
  kOffsetsStart,     // value: offsets[0]
  kOffsetsDecrease,  // at: place in offsets; limit, value: offsets[at - 1] and offsets[at]
  kOffsetsEnd,       // value: the last of offsets, limit: the number of indices
};

// In memory of the host that the device writes: the first fault that is not reported yet.
struct FaultRecord {
  int64_t fault;  // a Fault: claims the record, and is written last
  int64_t at, table, feature, value, limit;
};

// For an id out of range. It reads row 0 in any case; of a shard without rows it is always a fault.
enum class CheckMode { kFatal, kWarning, kIgnore };

struct PlanCall {
  std::vector<TTShape> tables;
  std::vector<CacheTags> caches;  // one per table
  std::vector<int64_t> feature_tables;  // [F]
  int64_t batch_size = 0;
  int64_t num_indices = 0;       // N
  const void* indices = nullptr;  // [N]
  bool has_long_indices = true;   // int64, else int32
  const void* offsets = nullptr;  // [F * batch_size + 1]
  bool has_long_offsets = true;
  CheckMode mode = CheckMode::kFatal;
  // outputs, as csrc/cpu/plan.cpp describes them
  int32_t* order = nullptr;          // [N]
  int32_t* inverse = nullptr;        // [N]
  int64_t* row_keys = nullptr;       // [N]
  int32_t* row_starts = nullptr;     // [N + 1]
  int32_t* prefix_starts = nullptr;  // [N + 1]
  int64_t* counts = nullptr;         // [4]; 0, 0, 0, -1 where the offsets are wrong
  FaultRecord* faults = nullptr;     // of the device, as `warnings`: they take the batch's first if
  FaultRecord* warnings = nullptr;   // they hold none; null: not asked for
};

// Working memory in bytes; it begins at a multiple of 256.
int64_t plan_workspace_bytes(const PlanCall& call);
void launch_plan(const PlanCall& call, void* workspace, cudaStream_t stream);

// What the current device says to the build's code: cudaSuccess if it runs it.
cudaError_t probe_device();

}  // namespace torchrec_tt::cuda
