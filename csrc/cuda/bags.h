// The bags of a call, as kernels read them.
#pragma once

#include "call_memory.h"

namespace torchrec_tt::cuda {

constexpr int64_t kMaxBags = 1 << 30;

struct Feature {
  int64_t column;  // its first of the output
  int table, dim;
  int64_t cached_key, num_slots;  // as in Table
  const void* cached_rows;
  Storage cached_storage;
};

struct Bags {
  const void* offsets;  // [num_bags + 1]
  const int64_t* counts;  // of the plan
  int has_long_offsets;
  const Feature* features;  // [F]
  int num_bags, batch_size;
  int64_t num_columns, num_indices;
  const float* weights;  // [N] or null
  int is_mean, is_pooled;

  // Where a bag begins. Bags are empty where the plan found the offsets wrong, which the host only
  // hears of later; what others than the plan's say is kept within the indices.
  __device__ int64_t offset(int bag) const {
    const int64_t at = has_long_offsets ? static_cast<const int64_t*>(offsets)[bag]
                                        : static_cast<const int32_t*>(offsets)[bag];
    return counts[3] < 0 ? 0 : max(int64_t{0}, min(at, num_indices));
  }
};

struct BagsMemory {
  Bags bags{};
  std::vector<Feature> features;

  BagsMemory(const Lookup& lookup, Workspace& workspace) {
    for (size_t f = 0; f < lookup.feature_tables.size(); f++) {
      const int table = static_cast<int>(lookup.feature_tables[f]);
      const Table& t = lookup.tables[table];
      features.push_back({lookup.feature_columns[f], table, t.dim(), t.cached_key,
                          t.cached_rows ? t.num_slots : 0, t.cached_rows, t.cached_storage});
    }
    bags.offsets = lookup.offsets;
    bags.counts = lookup.plan.counts;
    bags.num_indices = lookup.plan.num_indices;
    bags.has_long_offsets = lookup.has_long_offsets;
    bags.features = workspace.take<Feature>(features.size());
    const int64_t num_bags = static_cast<int64_t>(features.size()) * lookup.batch_size;
    TT_CHECK(num_bags < kMaxBags, "offsets must have less than ", kMaxBags, " bags on CUDA, got ",
             num_bags);
    bags.batch_size = static_cast<int>(lookup.batch_size);
    bags.num_bags = static_cast<int>(num_bags);
    bags.num_columns = lookup.num_columns;
    bags.weights = lookup.weights;
    bags.is_mean = lookup.pooling == Pooling::kMean;
    bags.is_pooled = lookup.pooling != Pooling::kNone;
  }

  void prepare(cudaStream_t stream) const {
    launch_upload(features.data(), features.size() * sizeof(Feature),
                  const_cast<Feature*>(bags.features), stream);
  }
};

}  // namespace torchrec_tt::cuda
