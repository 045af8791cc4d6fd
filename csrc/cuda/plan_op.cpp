// The operator plan on CUDA, and what says how earlier batches fared.
#include <limits>

#include "../cache_tags.h"
#include "lookup_call.h"

namespace torchrec_tt::cuda {
namespace {

// Kernels number indices, rows and prefixes by int and step at most a warp's width past the last one.
constexpr int64_t kMaxIndices = std::numeric_limits<int32_t>::max() - 32;

CheckMode mode_of(const std::string& name) {
  if (name == "fatal") return CheckMode::kFatal;
  if (name == "warning") return CheckMode::kWarning;
  TT_CHECK(name == "ignore", "check_mode must be fatal, warning or ignore, got ", name);
  return CheckMode::kIgnore;
}

bool is_int64(const Tensor& tensor, const char* name) {
  TT_CHECK(tensor.dim() == 1, name, " must have 1 dimension, got ", tensor.dim());
  const ScalarType type = tensor.scalar_type();
  TT_CHECK(type == ScalarType::Int || type == ScalarType::Long, name,
           " must be int32 or int64, got ", type);
  return type == ScalarType::Long;
}

std::vector<Tensor> plan(const Tensor& indices, const Tensor& offsets,
                         const std::vector<int64_t>& tables_flat,
                         const std::vector<int64_t>& feature_tables, std::string check_mode,
                         const std::vector<Tensor>& cache_ids) {
  Context context(indices, "indices");
  context.check(indices, "indices");
  context.check(offsets, "offsets");
  PlanCall call;
  call.tables = decode_tables(tables_flat);
  TT_CHECK(!call.tables.empty(), "tables must not be empty");
  call.has_long_indices = is_int64(indices, "indices");
  call.has_long_offsets = is_int64(offsets, "offsets");
  const Features features(feature_tables, call.tables, offsets.numel());
  const int64_t n = call.num_indices = indices.numel();
  TT_CHECK(n <= kMaxIndices, "indices must have at most ", kMaxIndices, " entries on CUDA, got ", n);
  call.mode = mode_of(check_mode);
  for (const TTShape& table : call.tables) {
    TT_CHECK(call.has_long_indices || table.num_rows - 1 <= std::numeric_limits<int32_t>::max(),
             "indices must be int64 for a table of ", table.num_rows, " rows, got int32");
  }
  call.caches = take_tags(cache_ids, call.tables, [&](const Tensor& ids, size_t t) {
    check_cache_ids(context, ids, t);
  });
  call.feature_tables = features.table;
  call.batch_size = features.batch_size;
  call.indices = indices.const_data_ptr();
  call.offsets = offsets.const_data_ptr();
  const Tensor order = context.empty({n}, ScalarType::Int);
  const Tensor inverse = context.empty({n}, ScalarType::Int);
  const Tensor row_keys = context.empty({n}, ScalarType::Long);
  const Tensor row_starts = context.empty({n + 1}, ScalarType::Int);
  const Tensor prefix_starts = context.empty({n + 1}, ScalarType::Int);
  const Tensor counts = context.empty({4}, ScalarType::Long);
  call.order = static_cast<int32_t*>(order.mutable_data_ptr());
  call.inverse = static_cast<int32_t*>(inverse.mutable_data_ptr());
  call.row_keys = static_cast<int64_t*>(row_keys.mutable_data_ptr());
  call.row_starts = static_cast<int32_t*>(row_starts.mutable_data_ptr());
  call.prefix_starts = static_cast<int32_t*>(prefix_starts.mutable_data_ptr());
  call.counts = static_cast<int64_t*>(counts.mutable_data_ptr());
  call.faults = context.faults().fault;
  if (call.mode == CheckMode::kWarning) call.warnings = context.faults().warning;
  launch_plan(call, context.workspace(plan_workspace_bytes(call)), context.stream());
  context.check_launches();
  return {order, inverse, row_keys, row_starts, prefix_starts, counts};
}

// Waits for the device, then raises what a batch on it did wrong.
void check_errors(int64_t device) {
  [[maybe_unused]] const DeviceGuard guard(static_cast<int32_t>(device));
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("a CUDA kernel failed: ") + cudaGetErrorString(error));
  }
  const std::string fault = take(faults_of(static_cast<int32_t>(device)).fault);
  TT_CHECK(fault.empty(), fault);
}

// What a batch that came this far asked for out of range, "" if nothing; waits for nothing.
std::string take_warning(int64_t device) {
  return take(faults_of(static_cast<int32_t>(device)).warning);
}

}  // namespace
}  // namespace torchrec_tt::cuda

STABLE_TORCH_LIBRARY_IMPL(TT_OPERATORS, TT_CUDA_KEY, m) {
  m.impl("plan", TORCH_BOX(&torchrec_tt::cuda::plan));
}

STABLE_TORCH_LIBRARY_IMPL(TT_OPERATORS, CompositeExplicitAutograd, m) {
  m.impl("check_errors", TORCH_BOX(&torchrec_tt::cuda::check_errors));
  m.impl("take_warning", TORCH_BOX(&torchrec_tt::cuda::take_warning));
  m.impl("cuda_architectures", TORCH_BOX(&torchrec_tt::cuda::architectures));
}
