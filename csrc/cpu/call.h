// One call of a lookup operator: its tables, plan and cores as the kernels want them.
#pragma once

#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "../row_tags.h"
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
constexpr ScalarType kScalarType = sizeof(T) == 4 ? ScalarType::Float : ScalarType::Double;

inline bool is_type(const Tensor& tensor, ScalarType type) { return tensor.scalar_type() == type; }

template <typename T>
Storage storage_of(const Tensor& core) {
  if (sizeof(T) == 4 && is_type(core, ScalarType::BFloat16)) return Storage::kBFloat16;
  if (sizeof(T) == 4 && is_type(core, ScalarType::Half)) return Storage::kFloat16;
  if (sizeof(T) == 4 && is_type(core, ScalarType::Char)) return Storage::kInt8;
  return Storage::kNative;
}

using Tensors = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;
using Ints = std::vector<int64_t>;

// The bags of one call: the plan of their rows, and how they are pooled.
template <typename T>
struct Bags {
  const Kernels<T>& k = kernels<T>();
  std::vector<TTShape> shapes;  // of the tables
  Features features;
  PlanView plan;
  int64_t num_indices, num_rows, num_tt_rows, num_prefixes;  // num_tt_rows: through the cores
  std::vector<int64_t> offsets;
  const T* weights = nullptr;  // [N]
  bool is_mean = false, is_pooled = true;

  Bags(const Tensors& plan_tensors, const Tensor& offsets_tensor,
       const MaybeTensor& per_sample_weights, const Ints& tables_flat, const Ints& feature_tables,
       const std::string& pooling);

  int64_t output_rows() const { return is_pooled ? features.batch_size : num_indices; }
  int64_t output_columns() const { return is_pooled ? features.num_columns : dim(); }
  int64_t dim() const { return shapes[0].embedding_dim(); }
  int64_t max_dim() const {
    int64_t most = 0;
    for (const TTShape& shape : shapes) most = std::max(most, shape.embedding_dim());
    return most;
  }
  // The first unique row whose key is not below `key`.
  int64_t row_at(int64_t key) const {
    return std::lower_bound(plan.row_keys, plan.row_keys + num_rows, key) - plan.row_keys;
  }
  // Per index: its weight over its bag's length where pooling asks; null where all are 1.
  Buffer<T> scales(bool with_weights) const;
};

// A table's cache in a call, and the unique rows that lie in it; of no slots where it has none.
struct CallCache {
  int64_t num_slots, key_base, first_row, end_row;
  void* rows = nullptr;  // [num_slots, D]
  Storage storage = Storage::kNative;
};

// The caches of all tables from [C] or [C, D] tensors of each, or none; the plan's keys fit them.
template <typename T>
std::vector<CallCache> find_caches(const Bags<T>& bags, const Tensors& per_table, const char* name);

// Checks the tags of table t's cache; those of no elements are of no cache.
inline void check_cache_ids(const Tensor& ids, size_t t) {
  TT_CHECK(is_type(ids, ScalarType::Long), "cache_ids must be int64, got ", ids.scalar_type(),
           " for table ", t);
  TT_CHECK(ids.is_cpu() && ids.is_contiguous() && ids.dim() == 1 && ids.numel() % kWays == 0,
           "cache_ids must be contiguous, on the CPU, of 1 dimension and a multiple of ", kWays,
           " elements, got ", ids.numel(), " in ", ids.dim(), " dimensions for table ", t);
  TT_CHECK(ids.numel() / kWays < int64_t{1} << 31, "cache_ids must have less than 2^31 sets, got ",
           ids.numel() / kWays, " for table ", t);
}

// Lets a cache read, and step, rows [C, D] of table t.
template <typename T>
void take_rows(CallCache& cache, const Bags<T>& bags, const Tensor& rows, size_t t);

template <typename T>
struct Call : Bags<T> {
  using Bags<T>::k;
  using Bags<T>::plan;
  std::vector<CallTable<T>> tables;
  std::vector<CallCache> caches;  // of each table

  Call(const Tensors& plan_tensors, const Tensors& cores, const Tensors& cached_rows,
       const Tensor& offsets_tensor, const MaybeTensor& per_sample_weights, const Ints& tables_flat,
       const Ints& feature_tables, const std::string& pooling);

  // Cuts every table's prefixes into chunks of about equal cost, whatever the number of threads.
  std::vector<Chunk> chunks() const;
  // Where table t's unique rows are read, those that went through the cores from `computed`.
  RowsView<T> rows_view(size_t t, const T* computed) const {
    const CallCache& cache = caches[t];
    return {computed,   tables[t].first_row, tables[t].end_row,
            cache.rows, cache.storage,       cache.key_base};
  }
};

// The gradient of a call's output as its indices see it; their weights' own goes to grad_weights.
template <typename T>
struct OutputGradient {
  Buffer<int64_t> sorted_at;  // [N]
  Buffer<T> scale, weight_scale;
  GradView<T> view;

  OutputGradient(const Bags<T>& bags, const Tensor& grad_output, T* grad_weights = nullptr);
};

// Calls f with a float or a double: the type of the sums for the cores' dtype. Only a lookup takes
// quantised cores.
template <typename F>
auto dispatch(const std::vector<Tensor>& cores, const F& f, bool takes_int8 = false) {
  TT_CHECK(!cores.empty(), "cores must not be empty");
  const ScalarType type = cores[0].scalar_type();
  if (type == ScalarType::Double) return f(double{});
  if (takes_int8 && type == ScalarType::Char) return f(float{});
  TT_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
           "cores must be float32, bfloat16, float16", takes_int8 ? ", int8" : "", " or float64, got ", type);
  return f(float{});
}

}  // namespace torchrec_tt
