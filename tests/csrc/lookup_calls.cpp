// The launchers of csrc/cuda/launchers.h for tests: plain pointers in, working memory made here.
#include <cstring>
#include <string>
#include <vector>

#include "launchers.h"

namespace {

using namespace torchrec_tt;
using namespace torchrec_tt::cuda;

// As tests/csrc/lookup_calls.py has it.
struct LookupCall {
  const int64_t* tables;
  int64_t num_integers;
  void** cores;
  int64_t storage;
  void* plan[6];
  int64_t num_indices;
  const int64_t* feature_tables;
  int64_t num_features;
  const void* offsets;
  int64_t num_offsets, has_long_offsets;
  const float* weights;
  int64_t pooling, precision, shared_bytes, num_multiprocessors;
};

Lookup make_lookup(const LookupCall& c) {
  Lookup lookup;
  const auto shapes = decode_tables(std::vector<int64_t>(c.tables, c.tables + c.num_integers));
  void** core = c.cores;
  for (const TTShape& shape : shapes) {
    lookup.tables.push_back(make_table(shape, core, static_cast<Storage>(c.storage)));
    core += shape.num_cores;
  }
  const Features features({c.feature_tables, c.feature_tables + c.num_features}, shapes, c.num_offsets);
  lookup.feature_tables = features.table;
  lookup.feature_columns = features.column;
  lookup.batch_size = features.batch_size;
  lookup.pooling = static_cast<Pooling>(c.pooling);
  lookup.num_columns =
      lookup.pooling == Pooling::kNone ? shapes[0].embedding_dim() : features.num_columns;
  lookup.plan = {static_cast<int32_t*>(c.plan[0]), static_cast<int32_t*>(c.plan[1]),
                 static_cast<int64_t*>(c.plan[2]), static_cast<int32_t*>(c.plan[3]),
                 static_cast<int32_t*>(c.plan[4]), static_cast<int64_t*>(c.plan[5]),
                 c.num_indices};
  lookup.offsets = c.offsets;
  lookup.has_long_offsets = c.has_long_offsets;
  lookup.weights = c.weights;
  lookup.precision = static_cast<Precision>(c.precision);
  lookup.device = {static_cast<int>(c.shared_bytes), static_cast<int>(c.num_multiprocessors)};
  return lookup;
}

// Memory full of NaNs, as what an allocator gives may be.
struct Memory {
  std::vector<float4> data;
  explicit Memory(int64_t bytes) : data(bytes / sizeof(float4) + 1) {
    std::memset(static_cast<void*>(data.data()), 0xff, data.size() * sizeof(float4));
  }
  void* get() { return data.data(); }
};

std::string error;

template <typename F>
const char* caught(const F& f) {
  try {
    f();
    return nullptr;
  } catch (const std::invalid_argument& e) {
    error = e.what();
  } catch (const std::runtime_error& e) {
    error = std::string("CUDA: ") + e.what();
  }
  return error.c_str();
}

}  // namespace

extern "C" {

const char* lookup_forward(const LookupCall* call, float* output) {
  return caught([&] {
    const Lookup lookup = make_lookup(*call);
    Memory memory(forward_workspace_bytes(lookup));
    launch_forward(lookup, output, memory.get(), nullptr);
  });
}

const char* lookup_backward(const LookupCall* call, const float* grad_output, float** grads,
                            float* grad_weights, int32_t* touched, int64_t is_deterministic,
                            int64_t rows_at_once) {
  return caught([&] {
    Lookup lookup = make_lookup(*call);
    for (Table& table : lookup.tables) {
      for (int k = 0; k < table.num_cores; k++) table.grads[k] = *grads++;
    }
    const Backward backward{grad_output, is_deterministic != 0, grad_weights, touched, rows_at_once};
    Memory memory(backward_workspace_bytes(lookup, backward));
    launch_backward(lookup, backward, memory.get(), nullptr);
  });
}

const char* step_cores(const CoreStep* cores, int64_t num_cores, int64_t optimizer,
                       const double* settings, int64_t decoupled_weight_decay) {
  return caught([&] {
    const std::vector<CoreStep> steps(cores, cores + num_cores);
    StepSettings of{static_cast<Optimizer>(optimizer), settings[0], settings[1], settings[2],
                    settings[3], settings[4], decoupled_weight_decay != 0, {99 << 10, 2}};
    Memory memory(step_workspace_bytes(steps));
    launch_step(steps, of, memory.get(), nullptr);
  });
}

}  // extern "C"
