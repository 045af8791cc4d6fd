// What the CUDA kernels take: descriptors of one call, sizes of its working memory, and launchers.
//
// No torch here and no allocation: a caller asks for `workspace_bytes`, allocates as much (aligned to
// 256 bytes) and passes it on. Nothing is read back from the device; launches are sized by what the
// host knows and end early by the plan's counts. A launch sequence is as long for one table as for 26.
#pragma once

#include <cstdint>
#include <vector>

#include "../tt_shape.h"
#include "device.h"

namespace torchrec_tt::cuda {

// Raises what CUDA reports.
void check_cuda(cudaError_t error);

// How the elements of a core are kept; sums are always float32.
enum class Storage : int { kFloat32, kBFloat16, kFloat16 };

// Of the products with a mid slice. kTF32 and kBFloat16 round their factors and run on tensor cores;
// products with a last slice, a few columns wide, are float32 always.
enum class Precision : int { kFloat32, kTF32, kBFloat16 };

enum class Pooling : int { kSum, kMean, kNone };

// The tensors of a plan, as csrc/cpu/plan.cpp describes them.
struct PlanView {
  const int32_t* order;          // [N]
  const int32_t* inverse;        // [N]
  const int64_t* row_keys;       // [N], the first U valid
  const int32_t* row_starts;     // [N + 1]
  const int32_t* prefix_starts;  // [N + 1]
  const int64_t* counts;         // [4]: U, U that go through the cores, Q, ids out of range; see plan.h
  int64_t num_indices;           // N
};

// One table as head, mid and last (tt_shape.h), with its cores on the device.
struct Table {
  int num_cores, has_mid;
  int n_head, n_mid, n_last;  // a head slice is [n_head, r_head], a mid slice [r_head, n_mid * rank],
  int r_head, rank;           // a last slice [rank, n_last]
  Storage storage;
  int64_t m_head, m_mid, m_last, key_base;
  const void* cores[kMaxCores];      // core k is [m_k, slice_size(k)]
  float* grads[kMaxCores];           // like the cores; null in a forward
  int64_t m[kMaxCores];
  int64_t first_slice[kMaxCores];    // set by the launchers: of core k, among those of the call
  // 4 cores: a head is [n0, r1] @ [r1, n1 * r_head], with digit i0 * m1 + i1
  int n0, r1, n1;
  int64_t m1;
  int64_t first_head_digit;  // of the table, in the call's map of heads
  int64_t first_head_place;
  int64_t heads_at;  // where its heads begin in the call's memory for them, in floats
  // The cache: slot s has the key cached_key + s. Null rows are out of this call's reach.
  int64_t cached_key, num_slots;
  const void* cached_rows;  // [num_slots, dim]
  Storage cached_storage;
  // Set by the launchers: whether a block's memory for this table is shared memory; and of
  // deterministic sums where its last slices' gradients, then its heads', begin among their targets.
  int is_tiled;
  int64_t first_target;

  __host__ __device__ int m_rows() const { return n_head * n_mid; }
  __host__ __device__ int dim() const { return m_rows() * n_last; }
  __host__ __device__ int head_size() const { return n_head * r_head; }
  __host__ __device__ int mid_size() const { return r_head * n_mid * rank; }
  __host__ __device__ int last_size() const { return rank * n_last; }
  __host__ __device__ int mid_core() const { return num_cores - 2; }
  __host__ __device__ int last_core() const { return num_cores - 1; }
};

// Describes a table; its cores are device pointers, null for a call that reads none.
Table make_table(const TTShape& shape, const void* const* cores, Storage storage);

struct Device {
  int shared_bytes = 0;         // of one block at most (cudaDevAttrMaxSharedMemoryPerBlockOptin)
  int num_multiprocessors = 0;
};

// The limits of the current device.
Device current_device();

// One call. Bags are feature-major: that of feature f and sample b is number f * batch_size + b.
struct Lookup {
  std::vector<Table> tables;
  std::vector<int64_t> feature_tables;   // [F]
  std::vector<int64_t> feature_columns;  // [F] its first column of the output
  int64_t batch_size = 0;
  int64_t num_columns = 0;  // of the output, a table's dim without pooling
  PlanView plan{};
  const void* offsets = nullptr;  // [F * batch_size + 1]
  bool has_long_offsets = true;   // int64, else int32
  const float* weights = nullptr;  // [N] or null
  Pooling pooling = Pooling::kSum;
  Precision precision = Precision::kFloat32;
  Device device;
};

struct Backward {
  const float* grad_output = nullptr;  // as the output
  bool is_deterministic = false;       // no atomic sums: one result, bit for bit
  float* grad_weights = nullptr;       // [N] or null
  int32_t* touched = nullptr;          // [slices of all cores]: 1 where a slice got a gradient, others
                                       // hold anything; or null: others hold 0
  int64_t rows_at_once = 0;            // deterministic: rows whose terms are kept; 0: as memory allows
};

// How many slices the cores of all tables have together.
int64_t num_slices(const Lookup& lookup);

// output [batch_size, num_columns], or without pooling [N, dim].
int64_t forward_workspace_bytes(const Lookup& lookup);
void launch_forward(const Lookup& lookup, float* output, void* workspace, cudaStream_t stream);

// Fills the tables' grads, every slice of every core, and grad_weights.
int64_t backward_workspace_bytes(const Lookup& lookup, const Backward& backward);
void launch_backward(const Lookup& lookup, const Backward& backward, void* workspace,
                     cudaStream_t stream);

enum class Optimizer : int { kSgd, kAdagrad, kRowwiseAdagrad, kAdam };

// A core, its gradient and its optimizer state (csrc/cpu/update.h has the formulas).
struct CoreStep {
  void* weight;         // [num_slices, slice_size]
  const float* grad;    // like weight
  float* moment1;       // adagrad: like weight; rowwise_adagrad: [num_slices]; adam: like weight
  float* moment2;       // adam: like weight
  int64_t* step;        // counted up first; adam, or stochastic rounding; else null
  const int32_t* touched;  // [num_slices] or null: slices without a gradient stay as they are
  int64_t num_slices, slice_size;
  int64_t rounding_seed;
  Storage storage;
  int is_stochastic;  // how a 16-bit core is rounded
};

struct StepSettings {
  Optimizer optimizer = Optimizer::kSgd;
  double learning_rate = 0, eps = 0, beta1 = 0, beta2 = 0, weight_decay = 0;
  bool decoupled_weight_decay = false;
  Device device{};
};

int64_t step_workspace_bytes(const std::vector<CoreStep>& cores);
void launch_step(const std::vector<CoreStep>& cores, const StepSettings& settings, void* workspace,
                 cudaStream_t stream);

// Cached rows that are stepped: `rows` are a table's [num_slots, dim] in CoreStep's terms, a null
// weight where they are not.
struct RowStep {
  CoreStep rows;
  const int64_t* ids;  // [num_slots] the tags
};

// Steps the cached rows of a batch on grad_output, which is as the output; a RowStep per table.
int64_t row_step_workspace_bytes(const Lookup& lookup);
void launch_row_step(const Lookup& lookup, const float* grad_output,
                     const std::vector<RowStep>& tables, const StepSettings& settings,
                     void* workspace, cudaStream_t stream);

// The counters of a table with a cache, see csrc/cpu/row_counter.cpp.
struct RowCounter {
  float* heats;           // [num_slots]; num_slots 0: the table has no cache
  int64_t num_slots;
  int64_t* ids;           // [8 * num_buckets]
  float* counter_heats;   // [8 * num_buckets]
  int64_t num_buckets;
  int64_t* statistics;    // [3 or more]
  float clock;            // 0: lfu
};

// Counts the rows of a planned batch; a RowCounter per table. The result is the CPU's, bit for bit.
int64_t count_workspace_bytes(const PlanView& plan, const std::vector<RowCounter>& counters);
void launch_count(const PlanView& plan, const std::vector<TTShape>& tables,
                  const std::vector<RowCounter>& counters, void* workspace, cudaStream_t stream);

// Copies bytes of the host to the device as arguments of a kernel, 32000 at a time: no pinned memory,
// no wait, and a captured graph keeps them.
void launch_upload(const void* from, int64_t bytes, void* to, cudaStream_t stream);

}  // namespace torchrec_tt::cuda
