// One call of a lookup operator: its tables, plan and cores as the kernels want them.
#pragma once

#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "../stable.h"
#include "../tt_shape.h"
#include "isa.h"

namespace torchrec_tt {

struct FreeAligned {
  void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
  static constexpr std::align_val_t kAlignment{64};  // a cache line: no vector lies across two
};

template <typename T>
using Buffer = std::unique_ptr<T[], FreeAligned>;

// Uninitialised memory for elements of a plain type.
template <typename T>
Buffer<T> buffer(int64_t size) {
  return Buffer<T>(static_cast<T*>(::operator new(size * sizeof(T), FreeAligned::kAlignment)));
}

// Runs f(job, scratch of scratch_size) for every job; which thread takes a job never shows.
template <typename T, typename F>
void for_each_job(int64_t num_jobs, int64_t scratch_size, const F& f) {
  const int64_t workers = std::min<int64_t>(num_jobs, torch::stable::get_num_threads());
  if (workers == 0) return;
  scratch_size = round_up(scratch_size, 64 / sizeof(T));  // whole cache lines for each
  const Buffer<T> scratch = buffer<T>(workers * scratch_size);
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t worker) {
    for (int64_t job; (job = next++) < num_jobs;) f(job, scratch.get() + worker * scratch_size);
  };
  if (workers == 1) return work(0);
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; worker++) work(worker);
  });
}

// Prefixes of one table that one job takes.
struct Chunk {
  int64_t table, prefix_begin, prefix_end;
};

// A table of the call: its part of the plan, and what is derived from its cores.
template <typename T>
struct CallTable {
  TTShape shape;
  TableView<T> view;
  int64_t first_row, end_row, first_prefix, end_prefix;
  size_t first_core;  // its first core in the call
  std::vector<void*> cores;
  Storage storage;  // of the cores
  Buffer<T> last_transposed;
  // 4 cores only: the distinct heads, ascending, and their products
  HeadPair<T> pair;
  std::vector<int64_t> head_digits;
  std::vector<int32_t> head_at;
  Buffer<T> heads;

  int64_t num_heads() const {
    return shape.num_cores == 4 ? static_cast<int64_t>(head_digits.size()) : shape.m[0];
  }
};

template <typename T>
struct Call {
  const Kernels<T>& k = kernels<T>();
  std::vector<CallTable<T>> tables;
  Features features;
  PlanView plan;
  int64_t num_indices, num_rows, num_prefixes;
  std::vector<int64_t> offsets;
  const T* weights = nullptr;  // [N]
  bool is_mean = false, is_pooled = true;

  Call(const std::vector<Tensor>& plan_tensors, const std::vector<Tensor>& cores,
       const Tensor& offsets_tensor, const std::optional<Tensor>& per_sample_weights,
       const std::vector<int64_t>& tables_flat, const std::vector<int64_t>& feature_tables,
       const std::string& pooling);

  int64_t output_rows() const { return is_pooled ? features.batch_size : num_indices; }
  int64_t output_columns() const { return is_pooled ? features.num_columns : dim(); }
  int64_t dim() const { return tables[0].shape.embedding_dim(); }

  // Cuts every table's prefixes into chunks of about equal cost, whatever the number of threads.
  std::vector<Chunk> chunks() const;
  // Per index: its weight over its bag's length where pooling asks; null where all are 1.
  Buffer<T> scales(bool with_weights) const;
};

template <typename T>
constexpr ScalarType kScalarType = sizeof(T) == 4 ? ScalarType::Float : ScalarType::Double;

inline bool is_type(const Tensor& tensor, ScalarType type) { return tensor.scalar_type() == type; }

template <typename T>
Storage storage_of(const Tensor& core) {
  if (sizeof(T) == 4 && is_type(core, ScalarType::BFloat16)) return Storage::kBFloat16;
  if (sizeof(T) == 4 && is_type(core, ScalarType::Half)) return Storage::kFloat16;
  return Storage::kNative;
}

// Calls f with a float or a double: the type of the sums for the cores' dtype.
template <typename F>
auto dispatch(const std::vector<Tensor>& cores, const F& f) {
  TT_CHECK(!cores.empty(), "cores must not be empty");
  const ScalarType type = cores[0].scalar_type();
  if (type == ScalarType::Double) return f(double{});
  TT_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
           "cores must be float32, bfloat16, float16 or float64, got ", type);
  return f(float{});
}

}  // namespace torchrec_tt
