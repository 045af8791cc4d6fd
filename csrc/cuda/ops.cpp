// The lookup operators on CUDA: checks and memory around the launchers of launchers.h.
#include <string>
#include <tuple>

#include "context.h"
#include "launchers.h"

namespace torchrec_tt::cuda {
namespace {

using Ints = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;
using MaybeTensor = std::optional<Tensor>;

std::string nth(const char* of, size_t i) { return std::string(of) + " " + std::to_string(i); }

void check_type(const Tensor& tensor, ScalarType type, const std::string& name) {
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

Storage storage_of(const Tensors& cores) {
  const ScalarType type = cores[0].scalar_type();
  if (type == ScalarType::Float) return Storage::kFloat32;
  if (type == ScalarType::BFloat16) return Storage::kBFloat16;
  TT_CHECK(type == ScalarType::Half, "cores must be float32, bfloat16 or float16 on CUDA, got ",
           type);
  return Storage::kFloat16;
}

// Where the tensors of a call are: on the device of its cores.
const Tensor& first_of(const Tensors& cores) {
  TT_CHECK(!cores.empty(), "cores must not be empty");
  return cores[0];
}

void check_no_cache(const Tensors& cached_rows) {
  for (size_t t = 0; t < cached_rows.size(); t++) {
    TT_CHECK(cached_rows[t].numel() == 0, "cached_rows must be empty on CUDA, whose row caches are",
             " not built yet, got ", cached_rows[t].numel(), " elements for table ", t);
  }
}

Precision precision_of(const std::string& name) {
  if (name == "highest") return Precision::kFloat32;
  if (name == "high") return Precision::kTF32;
  TT_CHECK(name == "medium", "precision must be highest, high or medium, got ", name);
  return Precision::kBFloat16;
}

Pooling pooling_of(const std::string& name) {
  if (name == "sum") return Pooling::kSum;
  if (name == "mean") return Pooling::kMean;
  TT_CHECK(name == "none", "pooling must be sum, mean or none, got ", name);
  return Pooling::kNone;
}

PlanView view_of(const Context& context, const Tensors& plan) {
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

// A call of a lookup operator.
struct Call {
  Context context;
  Lookup lookup;

  Call(const Tensors& plan, const Tensors& cores, const Tensors& cached_rows, const Tensor& offsets,
       const MaybeTensor& weights, const Ints& tables_flat, const Ints& feature_tables,
       const std::string& pooling, const std::string& precision)
      : context(first_of(cores), "cores") {
    check_no_cache(cached_rows);
    const std::vector<TTShape> shapes = decode_tables(tables_flat);
    const Features features(feature_tables, shapes, offsets.numel());
    lookup.feature_tables = features.table;
    lookup.feature_columns = features.column;
    lookup.batch_size = features.batch_size;
    lookup.plan = view_of(context, plan);
    lookup.pooling = pooling_of(pooling);
    lookup.precision = precision_of(precision);
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
    take_cores(shapes, cores);
  }

  bool is_pooled() const { return lookup.pooling != Pooling::kNone; }
  int64_t num_indices() const { return lookup.plan.num_indices; }
  int64_t output_rows() const { return is_pooled() ? lookup.batch_size : num_indices(); }

  // Fills grads, one per core, and returns the gradient of the weights, empty unless asked for.
  Tensor backward(const Tensor& grad_output, const std::vector<float*>& grads, bool weights_grad,
                  bool is_deterministic, int32_t* touched) {
    size_t core = 0;
    for (Table& table : lookup.tables) {
      for (int k = 0; k < table.num_cores; k++) table.grads[k] = grads[core++];
    }
    TT_CHECK(grad_output.dim() == 2 && grad_output.size(0) == output_rows() &&
                 grad_output.size(1) == lookup.num_columns,
             "grad_output must be [", output_rows(), ", ", lookup.num_columns, "]");
    Backward pass;
    pass.grad_output = data<float>(context, grad_output, ScalarType::Float,
                                   output_rows() * lookup.num_columns, "grad_output");
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
  void take_cores(const std::vector<TTShape>& shapes, const Tensors& cores) {
    const Storage storage = storage_of(cores);
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

// The optimizer's settings, and its states as csrc/cpu/optimizer.h orders them.
struct Step {
  StepSettings settings;
  std::vector<CoreStep> cores;

  Step(const Context& context, const std::string& optimizer, const Tensors& weights,
       const Tensors& states, const Ints& rounding_seeds) {
    settings.optimizer = optimizer_of(optimizer);
    settings.device = current_device();
    const bool is_stochastic = !rounding_seeds.empty();
    TT_CHECK(!is_stochastic || rounding_seeds.size() == weights.size(),
             "rounding_seeds must have ", weights.size(), " entries or none, got ",
             rounding_seeds.size());
    const bool is_adam = settings.optimizer == Optimizer::kAdam;
    const int moments = settings.optimizer == Optimizer::kSgd ? 0 : is_adam ? 2 : 1;
    const bool has_step = is_adam || is_stochastic;
    const size_t per_core = moments + has_step;
    TT_CHECK(states.size() == per_core * weights.size(), "states must have ",
             per_core * weights.size(), " tensors for ", optimizer, ", got ", states.size());
    const Storage storage = storage_of(weights);
    for (size_t i = 0; i < weights.size(); i++) {
      const Tensor& weight = weights[i];
      CoreStep core{};
      core.weight = data<void>(context, weight, weights[0].scalar_type(), weight.numel(),
                               nth("core", i));
      TT_CHECK(weight.dim() == 2 && weight.numel() > 0,
               "cores must be matrices, not empty, core ", i, " is not");
      core.num_slices = weight.size(0);
      core.slice_size = weight.size(1);
      core.storage = storage;
      core.is_stochastic = is_stochastic;
      core.rounding_seed = is_stochastic ? rounding_seeds[i] : 0;
      const int64_t size =
          settings.optimizer == Optimizer::kRowwiseAdagrad ? core.num_slices : weight.numel();
      const auto state = [&](size_t k) {
        const size_t at = i * per_core + k;
        return data<float>(context, states[at], ScalarType::Float, size, nth("state", at));
      };
      if (moments > 0) core.moment1 = state(0);
      if (moments > 1) core.moment2 = state(1);
      if (has_step) {
        const size_t at = i * per_core + moments;
        core.step = data<int64_t>(context, states[at], ScalarType::Long, 1, nth("state", at));
      }
      cores.push_back(core);
    }
  }

  static Optimizer optimizer_of(const std::string& name) {
    if (name == "sgd") return Optimizer::kSgd;
    if (name == "adagrad") return Optimizer::kAdagrad;
    if (name == "rowwise_adagrad") return Optimizer::kRowwiseAdagrad;
    TT_CHECK(name == "adam", "optimizer must be sgd, adagrad, rowwise_adagrad or adam, got ", name);
    return Optimizer::kAdam;
  }

  void launch(Context& context) const {
    launch_step(cores, settings, context.workspace(step_workspace_bytes(cores)), context.stream());
    context.check_launches();
  }
};

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
  Step step(context, optimizer, cores, states, rounding_seeds);
  step.settings.learning_rate = learning_rate;
  step.settings.eps = eps;
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
  Step step(context, optimizer, cores, states, rounding_seeds);
  step.settings.learning_rate = learning_rate;
  step.settings.eps = eps;
  step.settings.beta1 = beta1;
  step.settings.beta2 = beta2;
  step.settings.weight_decay = weight_decay;
  step.settings.decoupled_weight_decay = decoupled_weight_decay;
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
