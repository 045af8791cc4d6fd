// Every operator's schema. The integers of `tables` are described in tt_shape.h, the plan in
// cpu/plan.cpp. `precision` is that of CUDA's matrix products (highest, high or medium, as torch's
// float32 matmul precision); it and `deterministic` change nothing on the CPU.
#include <stdexcept>
#include <string>

#include "stable.h"

STABLE_TORCH_LIBRARY(TT_OPERATORS, m) {
  m.def(
      "plan(Tensor indices, Tensor offsets, int[] tables, int[] feature_tables, str check_mode,"
      " Tensor[] cache_ids) -> Tensor[]");
  m.def(
      "embedding_bag_forward(Tensor[] plan, Tensor[] cores, Tensor[] cached_rows, Tensor offsets,"
      " Tensor? per_sample_weights, int[] tables, int[] feature_tables, str pooling,"
      " str precision='highest') -> Tensor");
  m.def(
      "embedding_bag_backward_dense(Tensor grad_output, Tensor[] plan, Tensor[] cores,"
      " Tensor[] cached_rows, Tensor offsets, Tensor? per_sample_weights, int[] tables,"
      " int[] feature_tables, str pooling, bool weights_grad, str precision='highest',"
      " bool deterministic=False) -> (Tensor[] grad_cores, Tensor grad_weights)");
  m.def(
      "embedding_bag_backward_update(Tensor grad_output, Tensor[] plan, Tensor(a!)[] cores,"
      " Tensor(b!)[] states, Tensor[] cached_rows, Tensor offsets, Tensor? per_sample_weights,"
      " int[] tables, int[] feature_tables, str pooling, bool weights_grad, str optimizer,"
      " float learning_rate, float eps, int[] rounding_seeds,"
      " str precision='highest', bool deterministic=False) -> Tensor grad_weights");
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
  m.def("advise_huge_pages(Tensor[] tensors) -> ()");
  m.def("check_errors(int device) -> ()");
  m.def("take_warning(int device) -> str");
  m.def("cuda_architectures() -> str");
  m.def("cpu_isa() -> str");
  m.def("cpu_peak_gflops() -> float");
}

#ifndef TORCHREC_TT_WITH_CUDA
// A tensor on CUDA meets one sentence in a build without its operators.
namespace {

void refuse_cuda(StableIValue*, uint64_t, uint64_t) {
  throw std::runtime_error(
      "this build of torchrec_tt has no CUDA operators: build it where nvcc is, with "
      "`pip install --no-build-isolation . -C cmake.define.TORCHREC_TT_WITH_CUDA=ON`");
}

std::string no_architectures() { return ""; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(TT_OPERATORS, CUDA, m) {
  for (const char* name :
       {"plan", "embedding_bag_forward", "embedding_bag_backward_dense",
        "embedding_bag_backward_update", "step_cores", "step_cached_rows", "count_rows",
        "place_rows"}) {
    m.impl(name, &refuse_cuda);
  }
}

STABLE_TORCH_LIBRARY_IMPL(TT_OPERATORS, CompositeExplicitAutograd, m) {
  m.impl("check_errors", &refuse_cuda);
  m.impl("take_warning", &refuse_cuda);
  m.impl("cuda_architectures", TORCH_BOX(&no_architectures));
}
#endif
