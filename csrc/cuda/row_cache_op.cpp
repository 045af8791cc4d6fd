// The operators of row caches on CUDA: checks and memory around the launchers of launchers.h.
#include "../row_counter.h"
#include "optimizer_step.h"

namespace torchrec_tt::cuda {
namespace {

void step_cached_rows(const Tensor& grad_output, const Tensors& plan, const Tensors& cache_ids,
                      const Tensors& cached_rows, const Tensors& states, const Tensor& offsets,
                      const MaybeTensor& per_sample_weights, const Ints& tables,
                      const Ints& feature_tables, std::string pooling, std::string optimizer,
                      double learning_rate, double eps, double beta1, double beta2,
                      double weight_decay, bool decoupled_weight_decay,
                      const Ints& rounding_seeds) {
  BatchCall call(grad_output, "grad_output", plan, offsets, per_sample_weights, tables,
                 feature_tables, pooling);
  const size_t num_tables = call.shapes.size();
  TT_CHECK(cache_ids.size() == num_tables && cached_rows.size() == num_tables,
           "cache_ids and cached_rows must have one tensor per table, ", num_tables, ", got ",
           cache_ids.size(), " and ", cached_rows.size());
  const void* no_cores[kMaxCores] = {};
  Tensors stepped;
  for (size_t t = 0; t < num_tables; t++) {
    check_cache_ids(call.context, cache_ids[t], t);
    call.lookup.tables.push_back(make_table(call.shapes[t], no_cores, Storage::kFloat32));
    call.number_slots(t, cache_ids[t].numel());
    call.take_rows(t, cached_rows[t]);
    if (cached_rows[t].numel() > 0) stepped.push_back(cached_rows[t]);
  }
  const StepSettings settings{.learning_rate = learning_rate,
                              .eps = eps,
                              .beta1 = beta1,
                              .beta2 = beta2,
                              .weight_decay = weight_decay,
                              .decoupled_weight_decay = decoupled_weight_decay};
  Step step(call.context, optimizer, settings, stepped, states, rounding_seeds, "cached_rows");
  if (stepped.empty()) return;
  std::vector<RowStep> steps;
  size_t next = 0;
  for (size_t t = 0; t < num_tables; t++) {
    steps.push_back({cached_rows[t].numel() > 0 ? step.cores[next++] : CoreStep{},
                     static_cast<const int64_t*>(cache_ids[t].const_data_ptr())});
  }
  launch_row_step(call.lookup, call.gradient_of_output(grad_output), steps, step.settings,
                  call.context.workspace(row_step_workspace_bytes(call.lookup)),
                  call.context.stream());
  call.context.check_launches();
}

void count_rows(const Tensors& plan, const Ints& tables_flat, const Tensors& heats,
                const Tensors& counter_ids, const Tensors& counter_heats, const Tensors& statistics,
                const Ints& clocks) {
  const auto tables = decode_tables(tables_flat);
  TT_CHECK(plan.size() == 6, "plan must hold 6 tensors, got ", plan.size());
  Context context(plan[0], "plan");
  for (size_t size : {heats.size(), counter_ids.size(), counter_heats.size(), statistics.size(),
                      clocks.size()}) {
    TT_CHECK(size == tables.size(), "heats, counter_ids, counter_heats, statistics and clocks must have ",
             tables.size(), " entries, one per table, got ", size);
  }
  std::vector<RowCounter> counters;
  for (size_t t = 0; t < tables.size(); t++) {
    const int64_t num_slots = heats[t].numel(), num_cells = counter_ids[t].numel();
    counters.emplace_back();
    if (num_slots == 0) continue;
    TT_CHECK(num_cells > 0 && num_cells % kCells == 0, "counter_ids must have a multiple of ", kCells,
             " elements, got ", num_cells, " for table ", t);
    TT_CHECK(statistics[t].numel() >= 3, "statistics must have at least 3 elements, got ",
             statistics[t].numel(), " for table ", t);
    const auto floats = [&](const Tensors& from, int64_t size, const char* name) {
      return data<float>(context, from[t], ScalarType::Float, size, nth(name, t));
    };
    counters[t] = {floats(heats, num_slots, "heats"),
                   num_slots,
                   data<int64_t>(context, counter_ids[t], ScalarType::Long, num_cells,
                                 nth("counter_ids", t)),
                   floats(counter_heats, num_cells, "counter_heats"),
                   num_cells / kCells,
                   data<int64_t>(context, statistics[t], ScalarType::Long, statistics[t].numel(),
                                 nth("statistics", t)),
                   static_cast<float>(clocks[t])};
  }
  const PlanView view = view_of(context, plan);
  launch_count(view, tables, counters, context.workspace(count_workspace_bytes(view, counters)),
               context.stream());
  context.check_launches();
}

}  // namespace
}  // namespace torchrec_tt::cuda

STABLE_TORCH_LIBRARY_IMPL(TT_OPERATORS, TT_CUDA_KEY, m) {
  namespace ops = torchrec_tt::cuda;
  m.impl("step_cached_rows", TORCH_BOX(&ops::step_cached_rows));
  m.impl("count_rows", TORCH_BOX(&ops::count_rows));
}
