// A call of an operator on a batch: what its tensors say, checked, as the launchers take it.
#pragma once

#include <limits>
#include <string>

#include "../row_tags.h"
#include "context.h"
#include "launchers.h"

namespace torchrec_tt::cuda {

using Ints = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;

inline std::string nth(const char* of, size_t i) { return std::string(of) + " " + std::to_string(i); }

inline void check_type(const Tensor& tensor, ScalarType type, const std::string& name) {
  TT_CHECK(tensor.scalar_type() == type, name, " must be ", type, ", got ", tensor.scalar_type());
}

// A tensor's memory, once it is known to be of this call.
template <typename T>
T* data(const Context& context, const Tensor& tensor, ScalarType type, int64_t size,
        const std::string& name) {
  context.check(tensor, name);
  check_type(tensor, type, name);
  TT_CHECK(tensor.numel() == size, name, " must have ", size, " elements, got ", tensor.numel());
  return static_cast<T*>(tensor.mutable_data_ptr());
}

inline Storage storage_of(const Tensor& tensor, const char* name) {
  const ScalarType type = tensor.scalar_type();
  if (type == ScalarType::Float) return Storage::kFloat32;
  if (type == ScalarType::BFloat16) return Storage::kBFloat16;
  TT_CHECK(type == ScalarType::Half, name, " must be float32, bfloat16 or float16 on CUDA, got ",
           type);
  return Storage::kFloat16;
}

// Where the tensors of a call are: on the device of its cores.
inline const Tensor& first_of(const Tensors& cores) {
  TT_CHECK(!cores.empty(), "cores must not be empty");
  return cores[0];
}

inline Precision precision_of(const std::string& name) {
  if (name == "highest") return Precision::kFloat32;
  if (name == "high") return Precision::kTF32;
  TT_CHECK(name == "medium", "precision must be highest, high or medium, got ", name);
  return Precision::kBFloat16;
}

inline Pooling pooling_of(const std::string& name) {
  if (name == "sum") return Pooling::kSum;
  if (name == "mean") return Pooling::kMean;
  TT_CHECK(name == "none", "pooling must be sum, mean or none, got ", name);
  return Pooling::kNone;
}

inline PlanView view_of(const Context& context, const Tensors& plan) {
  TT_CHECK(plan.size() == 6, "plan must hold 6 tensors, got ", plan.size());
  const int64_t n = plan[0].numel();
  const auto ints = [&](int i, int64_t size) {
    return data<int32_t>(context, plan[i], ScalarType::Int, size, nth("plan", i));
  };
  const auto longs = [&](int i, int64_t size) {
    return data<int64_t>(context, plan[i], ScalarType::Long, size, nth("plan", i));
  };
  return {ints(0, n), ints(1, n), longs(2, n), ints(3, n + 1), ints(4, n + 1), longs(5, 4), n};
}

// The tags of table t's cache, as csrc/cpu/call.h asks for them.
inline void check_cache_ids(const Context& context, const Tensor& ids, size_t t) {
  check_type(ids, ScalarType::Long, nth("cache_ids", t));
  context.check(ids, nth("cache_ids", t));
  TT_CHECK(ids.dim() == 1 && ids.numel() % kWays == 0,
           "cache_ids must be of 1 dimension and a multiple of ", kWays, " elements, got ",
           ids.numel(), " in ", ids.dim(), " dimensions for table ", t);
  TT_CHECK(ids.numel() / kWays < int64_t{1} << 31, "cache_ids must have less than 2^31 sets, got ",
           ids.numel() / kWays, " for table ", t);
}

// A batch and its bags; the tables have neither cores nor caches yet.
struct BatchCall {
  Context context;
  std::vector<TTShape> shapes;
  Lookup lookup;

  BatchCall(const Tensor& first, const char* name, const Tensors& plan, const Tensor& offsets,
            const MaybeTensor& weights, const Ints& tables_flat, const Ints& feature_tables,
            const std::string& pooling)
      : context(first, name), shapes(decode_tables(tables_flat)) {
    const Features features(feature_tables, shapes, offsets.numel());
    lookup.feature_tables = features.table;
    lookup.feature_columns = features.column;
    lookup.batch_size = features.batch_size;
    lookup.plan = view_of(context, plan);
    lookup.pooling = pooling_of(pooling);
    lookup.device = current_device();
    lookup.num_columns = is_pooled() ? features.num_columns : shapes[0].embedding_dim();
    for (const TTShape& shape : shapes) {
      TT_CHECK(is_pooled() || shape.embedding_dim() == lookup.num_columns,
               "tables must have one embedding_dim for pooling none, got ", lookup.num_columns,
               " and ", shape.embedding_dim());
    }
    context.check(offsets, "offsets");
    lookup.has_long_offsets = offsets.scalar_type() == ScalarType::Long;
    TT_CHECK(lookup.has_long_offsets || offsets.scalar_type() == ScalarType::Int,
             "offsets must be int32 or int64, got ", offsets.scalar_type());
    lookup.offsets = offsets.const_data_ptr();
    if (weights) {
      lookup.weights = data<float>(context, *weights, ScalarType::Float, num_indices(),
                                   "per_sample_weights");
    }
  }

  bool is_pooled() const { return lookup.pooling != Pooling::kNone; }
  int64_t num_indices() const { return lookup.plan.num_indices; }
  int64_t output_rows() const { return is_pooled() ? lookup.batch_size : num_indices(); }

  const float* gradient_of_output(const Tensor& grad_output) const {
    TT_CHECK(grad_output.dim() == 2 && grad_output.size(0) == output_rows() &&
                 grad_output.size(1) == lookup.num_columns,
             "grad_output must be [", output_rows(), ", ", lookup.num_columns, "]");
    return data<float>(context, grad_output, ScalarType::Float,
                       output_rows() * lookup.num_columns, "grad_output");
  }

  // Gives table t the keys of its cache, of `num_slots` slots; tables in turn.
  void number_slots(size_t t, int64_t num_slots) {
    Table& table = lookup.tables[t];
    const TTShape& last = shapes.back();
    table.cached_key = t == 0 ? last.key_base + last.padded_rows()
                              : lookup.tables[t - 1].cached_key + lookup.tables[t - 1].num_slots;
    table.num_slots = num_slots;
  }

  // Lets table t read, and step, its cached rows [C, D]; those of no elements stay out of reach.
  void take_rows(size_t t, const Tensor& rows) {
    if (rows.numel() == 0) return;
    Table& table = lookup.tables[t];
    table.cached_storage = storage_of(rows, "cached_rows");
    table.cached_rows = data<void>(context, rows, rows.scalar_type(),
                                   table.num_slots * table.dim(), nth("cached_rows", t));
    TT_CHECK(rows.dim() == 2 && rows.size(0) == table.num_slots, "cached_rows must be [",
             table.num_slots, ", ", table.dim(), "] for table ", t);
  }
};

}  // namespace torchrec_tt::cuda
