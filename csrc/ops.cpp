// Every operator's schema. The integers of `tables` are described in tt_shape.h, the plan in cpu/plan.cpp.
#include "stable.h"

STABLE_TORCH_LIBRARY(torchrec_tt, m) {
  m.def(
      "plan(Tensor indices, Tensor offsets, int[] tables, int[] feature_tables, str check_mode,"
      " Tensor[] cache_ids) -> Tensor[]");
  m.def(
      "embedding_bag_forward(Tensor[] plan, Tensor[] cores, Tensor[] cached_rows, Tensor offsets,"
      " Tensor? per_sample_weights, int[] tables, int[] feature_tables, str pooling) -> Tensor");
  m.def(
      "embedding_bag_backward_dense(Tensor grad_output, Tensor[] plan, Tensor[] cores,"
      " Tensor[] cached_rows, Tensor offsets, Tensor? per_sample_weights, int[] tables,"
      " int[] feature_tables, str pooling, bool weights_grad) -> (Tensor[] grad_cores, Tensor grad_weights)");
  m.def(
      "embedding_bag_backward_update(Tensor grad_output, Tensor[] plan, Tensor(a!)[] cores,"
      " Tensor(b!)[] states, Tensor[] cached_rows, Tensor offsets, Tensor? per_sample_weights,"
      " int[] tables, int[] feature_tables, str pooling, bool weights_grad, str optimizer,"
      " float learning_rate, float eps, int[] rounding_seeds) -> Tensor grad_weights");
  m.def(
      "step_cached_rows(Tensor grad_output, Tensor[] plan, Tensor[] cache_ids,"
      " Tensor(a!)[] cached_rows, Tensor(b!)[] states, Tensor offsets,"
      " Tensor? per_sample_weights, int[] tables, int[] feature_tables, str pooling,"
      " str optimizer, float learning_rate, float eps, float beta1, float beta2,"
      " float weight_decay, bool decoupled_weight_decay, int[] rounding_seeds) -> ()");
  m.def(
      "step_cores(Tensor(a!)[] cores, Tensor[] grads, Tensor(b!)[] states, str optimizer,"
      " float learning_rate, float eps, float beta1, float beta2, float weight_decay,"
      " bool decoupled_weight_decay, int[] rounding_seeds) -> ()");
  m.def(
      "count_rows(Tensor[] plan, int[] tables, Tensor(a!)[] heats, Tensor(b!)[] counter_ids,"
      " Tensor(c!)[] counter_heats, Tensor(d!)[] statistics, int[] clocks) -> ()");
  m.def(
      "place_rows(Tensor(a!) ids, Tensor(b!) heats, Tensor(c!) counter_ids, Tensor(d!) counter_heats,"
      " float ratio, float margin) -> (Tensor slots, Tensor evicted_ids, Tensor evicted_heats)");
  m.def("cpu_isa() -> str");
  m.def("cpu_peak_gflops() -> float");
}
