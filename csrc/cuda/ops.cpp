// The lookup operators on CUDA: checks and memory around the launchers of launchers.h.
#include <string>
#include <tuple>

#include "lookup_call.h"
#include "optimizer_step.h"

namespace torchrec_tt::cuda {
namespace {

// A call of a lookup operator.
struct Call : BatchCall {
  Call(const Tensors& plan, const Tensors& cores, const Tensors& cached_rows, const Tensor& offsets,
       const MaybeTensor& weights, const Ints& tables_flat, const Ints& feature_tables,
       const std::string& pooling, const std::string& precision)
      : BatchCall(first_of(cores), "cores", plan, offsets, weights, tables_flat, feature_tables,
                  pooling) {
    lookup.precision = precision_of(precision);
    take_cores(cores);
    TT_CHECK(cached_rows.empty() || cached_rows.size() == shapes.size(),
             "cached_rows must have one tensor per table, ", shapes.size(), ", or none, got ",
             cached_rows.size());
    for (size_t t = 0; t < shapes.size(); t++) {
      const bool has_cache = !cached_rows.empty() && cached_rows[t].numel() > 0;
      number_slots(t, has_cache ? cached_rows[t].size(0) : 0);
      if (has_cache) take_rows(t, cached_rows[t]);
    }
  }

  // Fills grads, one per core, and returns the gradient of the weights, empty unless asked for.
  Tensor backward(const Tensor& grad_output, const std::vector<float*>& grads, bool weights_grad,
                  bool is_deterministic, int32_t* touched) {
    size_t core = 0;
    for (Table& table : lookup.tables) {
      for (int k = 0; k < table.num_cores; k++) table.grads[k] = grads[core++];
    }
    Backward pass;
    pass.grad_output = gradient_of_output(grad_output);
    pass.is_deterministic = is_deterministic;
    pass.touched = touched;
    const Tensor grad_weights =
        context.empty({weights_grad ? num_indices() : 0}, ScalarType::Float);
    if (weights_grad) pass.grad_weights = static_cast<float*>(grad_weights.mutable_data_ptr());
    void* memory = context.workspace(backward_workspace_bytes(lookup, pass));
    launch_backward(lookup, pass, memory, context.stream());
    return grad_weights;
  }

 private:
  void take_cores(const Tensors& cores) {
    const Storage storage = storage_of(cores[0], "cores");
    size_t first = 0;
    for (const TTShape& shape : shapes) {
      const void* of_table[kMaxCores] = {};
      for (int k = 0; k < shape.num_cores; k++) {
        const size_t i = first + k;
        TT_CHECK(i < cores.size(), "cores must hold every core of every table, got ", cores.size());
        of_table[k] = data<void>(context, cores[i], cores[0].scalar_type(),
                                 shape.m[k] * shape.slice_size(k), nth("core", i));
        TT_CHECK(cores[i].dim() == 2 && cores[i].size(0) == shape.m[k],
                 "cores must be [m_k, r_k * n_k * r_{k+1}], core ", i, " must be [", shape.m[k],
                 ", ", shape.slice_size(k), "]");
      }
      lookup.tables.push_back(make_table(shape, of_table, storage));
      first += shape.num_cores;
    }
    TT_CHECK(first == cores.size(), "cores must hold ", first, " tensors, got ", cores.size());
  }
};

Tensor embedding_bag_forward(const Tensors& plan, const Tensors& cores, const Tensors& cached_rows,
                             const Tensor& offsets, const MaybeTensor& per_sample_weights,
                             const Ints& tables, const Ints& feature_tables, std::string pooling,
                             std::string precision) {
  Call call(plan, cores, cached_rows, offsets, per_sample_weights, tables, feature_tables, pooling,
            precision);
  const Tensor output =
      call.context.empty({call.output_rows(), call.lookup.num_columns}, ScalarType::Float);
  launch_forward(call.lookup, static_cast<float*>(output.mutable_data_ptr()),
                 call.context.workspace(forward_workspace_bytes(call.lookup)),
                 call.context.stream());
  call.context.check_launches();
  return output;
}

std::tuple<Tensors, Tensor> embedding_bag_backward_dense(
    const Tensor& grad_output, const Tensors& plan, const Tensors& cores,
    const Tensors& cached_rows, const Tensor& offsets, const MaybeTensor& per_sample_weights,
    const Ints& tables, const Ints& feature_tables, std::string pooling, bool weights_grad,
    std::string precision, bool is_deterministic) {
  Call call(plan, cores, cached_rows, offsets, per_sample_weights, tables, feature_tables, pooling,
            precision);
  Tensors grad_cores;
  std::vector<float*> grads;
  for (const Tensor& core : cores) {
    grad_cores.push_back(call.context.empty({core.size(0), core.size(1)}, ScalarType::Float));
    grads.push_back(static_cast<float*>(grad_cores.back().mutable_data_ptr()));
  }
  const Tensor grad_weights =
      call.backward(grad_output, grads, weights_grad, is_deterministic, nullptr);
  call.context.check_launches();
  return {grad_cores, grad_weights};
}

Tensor embedding_bag_backward_update(
    const Tensor& grad_output, const Tensors& plan, const Tensors& cores, const Tensors& states,
    const Tensors& cached_rows, const Tensor& offsets, const MaybeTensor& per_sample_weights,
    const Ints& tables, const Ints& feature_tables, std::string pooling, bool weights_grad,
    std::string optimizer, double learning_rate, double eps, const Ints& rounding_seeds,
    std::string precision, bool is_deterministic) {
  TT_CHECK(optimizer != "adam",
           "optimizer must leave slices without a gradient alone, got adam: use step_cores");
  Call call(plan, cores, cached_rows, offsets, per_sample_weights, tables, feature_tables, pooling,
            precision);
  Context& context = call.context;
  Step step(context, optimizer, {.learning_rate = learning_rate, .eps = eps}, cores, states,
            rounding_seeds);
  std::vector<float*> grads;
  for (const Tensor& core : cores) {
    grads.push_back(static_cast<float*>(
        context.workspace(core.numel() * static_cast<int64_t>(sizeof(float)))));
  }
  auto* touched = static_cast<int32_t*>(
      context.workspace(num_slices(call.lookup) * static_cast<int64_t>(sizeof(int32_t))));
  const Tensor grad_weights =
      call.backward(grad_output, grads, weights_grad, is_deterministic, touched);
  for (size_t i = 0; i < cores.size(); i++) {
    step.cores[i].grad = grads[i];
    step.cores[i].touched = touched;
    touched += step.cores[i].num_slices;
  }
  step.launch(context);
  return grad_weights;
}

void step_cores(const Tensors& cores, const Tensors& grads, const Tensors& states,
                std::string optimizer, double learning_rate, double eps, double beta1, double beta2,
                double weight_decay, bool decoupled_weight_decay, const Ints& rounding_seeds) {
  Context context(first_of(cores), "cores");
  const StepSettings settings{.learning_rate = learning_rate,
                              .eps = eps,
                              .beta1 = beta1,
                              .beta2 = beta2,
                              .weight_decay = weight_decay,
                              .decoupled_weight_decay = decoupled_weight_decay};
  Step step(context, optimizer, settings, cores, states, rounding_seeds);
  TT_CHECK(grads.size() == cores.size(), "grads must have one tensor per core, ", cores.size(),
           ", got ", grads.size());
  for (size_t i = 0; i < cores.size(); i++) {
    step.cores[i].grad =
        data<float>(context, grads[i], ScalarType::Float, cores[i].numel(), nth("gradient", i));
  }
  step.launch(context);
}

}  // namespace
}  // namespace torchrec_tt::cuda

STABLE_TORCH_LIBRARY_IMPL(TT_OPERATORS, TT_CUDA_KEY, m) {
  namespace ops = torchrec_tt::cuda;
  m.impl("embedding_bag_forward", TORCH_BOX(&ops::embedding_bag_forward));
  m.impl("embedding_bag_backward_dense", TORCH_BOX(&ops::embedding_bag_backward_dense));
  m.impl("embedding_bag_backward_update", TORCH_BOX(&ops::embedding_bag_backward_update));
  m.impl("step_cores", TORCH_BOX(&ops::step_cores));
}
