// One call's descriptors on the device, and the working memory that forward and backward share.
#pragma once

#include <algorithm>

#include "block_layout.h"

namespace torchrec_tt::cuda {

constexpr int kThreads = 256;  // of a block
constexpr int kWarps = kThreads / 32;
// Blocks to a multiprocessor for which registers are given out: 64 and 128 to a thread. Left to
// itself ptxas spills to make room for more.
constexpr int kManyBlocks = 4, kFewBlocks = 2;

struct CallTable {
  Table table;
  BlockLayout at;
};

// What every kernel of a call reads.
struct Call {
  const CallTable* tables;    // [num_tables], ascending by key_base
  int num_tables;
  PlanView plan;
  const int32_t* head_slots;  // 4 cores: per head digit its place in the table's heads
  float* heads;               // 4 cores: the products of the heads that occur
  int num_jobs;               // into which the prefixes are cut, or more
  int64_t longest_group;      // of any table, in prefixes
  int in_shared;              // which tables a kernel takes, by is_tiled
  float* scratch;             // of blocks without shared memory, scratch_stride floats each
  int64_t scratch_stride;
};

// A block takes windows of prefixes: large ones, as each brings its groups' mid slices again, but not
// so large that multiprocessors are idle.
constexpr int kLeastWindow = 8, kMostWindow = 128;

constexpr int kNoHead = -1, kTakenHead = -2;

// Where the heads of 4-core tables go: digits to places, and back.
struct HeadMap {
  int32_t* slots;   // [num_slots] per head digit of every table: its place, or kNoHead
  int32_t* counts;  // [num_tables] places in use
  int64_t* digits;  // per place of every table
  int64_t num_slots;
};

// Cuts pieces, 256 bytes aligned, from a workspace; from null it only counts the bytes.
struct Workspace {
  char* base = nullptr;
  int64_t bytes = 0;

  template <typename T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(base + bytes);
    bytes += (std::max<int64_t>(count, 1) * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return base ? piece : nullptr;
  }
};

// Enough blocks for `jobs`, or to fill the device several times over.
inline unsigned blocks_for(const Device& device, int64_t jobs) {
  return static_cast<unsigned>(
      std::clamp<int64_t>(jobs, 1, 16 * int64_t{std::max(device.num_multiprocessors, 1)}));
}

struct CallMemory {
  std::vector<CallTable> tables;
  Call call{};
  HeadMap heads{};
  Device device;
  Precision precision;
  bool has_heads = false, has_tiled = false, has_general = false;
  int64_t most_heads = 0;    // places of a table
  int64_t head_floats = 0;   // of the heads of all tables
  int64_t shared_bytes = 0;  // of a block that works in shared memory
  int64_t general_blocks = 0;
  int max_dim = 0;

  CallMemory(const Lookup& lookup, bool is_backward, Workspace& workspace);

  unsigned blocks(int64_t jobs) const { return blocks_for(device, jobs); }
  // At most: how many prefixes there are is known to the device alone.
  int64_t num_windows() const { return (call.plan.num_indices + kLeastWindow - 1) / kLeastWindow; }
  // Brings the descriptors to the device and computes the heads.
  void prepare(cudaStream_t stream) const;
};

void launch_heads(const CallMemory& memory, cudaStream_t stream);
// Gradients of heads, like `heads`, to those of cores 0 and 1.
void launch_split_head_grads(const CallMemory& memory, const float* grad_heads, int32_t* touched,
                             cudaStream_t stream);
// rows [.., ld]: every unique row that goes through the cores.
void launch_rows(const CallMemory& memory, float* rows, int64_t ld, cudaStream_t stream);

}  // namespace torchrec_tt::cuda
