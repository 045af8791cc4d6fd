// Pooled TT lookup on the CPU: forward, dense core gradients, and gradients with the update.
#include <algorithm>
#include <chrono>

#include "call.h"
#include "optimizer.h"

namespace torchrec_tt {
namespace {

constexpr int64_t kBagsPerJob = 512;
constexpr int64_t kSlicesPerJob = 32;
constexpr int64_t kRowsPerJob = 512;

template <typename T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

template <typename T>
Tensor forward(const Call<T>& call) {
  const Features& features = call.features;
  const int64_t batch_size = features.batch_size;
  std::vector<int64_t> row_base;  // where a table's unique rows begin
  int64_t size = 0;
  for (const CallTable<T>& table : call.tables) {
    row_base.push_back(size);
    size += (table.end_row - table.first_row) * table.shape.embedding_dim();
  }
  const Buffer<T> rows = buffer<T>(size);
  const std::vector<Chunk> chunks = call.chunks();
  int64_t scratch_size = 0;
  for (const Chunk& c : chunks) {
    scratch_size = std::max(scratch_size, ChunkScratch<T>(call.tables[c.table].view, false).size);
  }
  for_each_job<T>(chunks.size(), scratch_size, [&](int64_t job, T* scratch) {
    const Chunk& c = chunks[job];
    const CallTable<T>& table = call.tables[c.table];
    call.k.forward(table.view, call.plan, c.prefix_begin, c.prefix_end,
                   rows.get() + row_base[c.table], table.first_row, scratch);
  });

  Tensor output =
      torch::stable::empty({call.output_rows(), call.output_columns()}, kScalarType<T>);
  const Buffer<T> scale = call.scales(true);
  const int64_t blocks = (batch_size + kBagsPerJob - 1) / kBagsPerJob;
  const int64_t num_features = static_cast<int64_t>(features.table.size());
  const bool is_widened = std::ranges::any_of(
      call.caches, [](const CallCache& cache) { return cache.storage != Storage::kNative; });
  for_each_job<T>(num_features * blocks, is_widened ? call.max_dim() : 0, [&](int64_t job, T* scratch) {
    const int64_t f = job / blocks, begin = job % blocks * kBagsPerJob;
    const int64_t t = features.table[f], dim = call.shapes[t].embedding_dim();
    const RowsView<T> view = call.rows_view(t, rows.get() + row_base[t]);
    const int64_t* bags = call.offsets.data() + f * batch_size;
    const int64_t end = std::min(batch_size, begin + kBagsPerJob);
    const auto pool = [&](const int64_t* of, int64_t first, int64_t last, T* out, int64_t ld_out) {
      call.k.pool(view, dim, call.plan, scale.get(), of, first, last, out, ld_out, scratch);
    };
    if (call.is_pooled) {
      pool(bags, begin, end, data<T>(output) + begin * features.num_columns + features.column[f],
           features.num_columns);
    } else {
      pool(nullptr, bags[begin], bags[end], data<T>(output) + bags[begin] * dim, dim);
    }
  });
  return output;
}

// The gradients that chunks of one table keep for themselves, and their reduction in chunk order.
template <typename T>
struct TableGrads {
  const CallTable<T>* table;
  std::vector<BackwardChunk<T>> chunks;
  Buffer<T> sums;
  Buffer<uint8_t> touched;
  const CoreUpdate<T>* updates = nullptr;  // [num_cores]

  TableGrads(const CallTable<T>& of, const PlanView& plan, const std::vector<Chunk>& pieces)
      : table(&of) {
    const TableView<T>& v = of.view;
    const int64_t heads = of.num_heads();
    const int64_t size =
        heads * v.head_size() + v.m_last * v.padded_last_size() + 2 * v.padded_mid_size();
    const int64_t flags = heads + v.m_last;
    const int64_t count = static_cast<int64_t>(pieces.size());
    sums = buffer<T>(size * count);
    touched = buffer<uint8_t>(flags * count);
    std::fill_n(touched.get(), flags * count, uint8_t{0});
    const auto mid_of = [&](int64_t q) {
      return (plan.row_keys[plan.prefix_starts[q]] - v.key_base) / v.m_last / v.m_head;
    };
    for (int64_t c = 0; c < count; c++) {
      BackwardChunk<T> chunk{};
      chunk.prefix_begin = pieces[c].prefix_begin;
      chunk.prefix_end = pieces[c].prefix_end;
      chunk.shared_first = chunk.shared_last = -1;
      if (v.has_mid && c > 0) {
        const int64_t mid = mid_of(chunk.prefix_begin);
        if (mid_of(chunk.prefix_begin - 1) == mid) chunk.shared_first = mid;
      }
      if (v.has_mid && c + 1 < count) {
        const int64_t mid = mid_of(chunk.prefix_end - 1);
        if (mid_of(chunk.prefix_end) == mid) chunk.shared_last = mid;
      }
      chunk.head = sums.get() + c * size;
      chunk.last = chunk.head + heads * v.head_size();
      chunk.shared[0] = chunk.last + v.m_last * v.padded_last_size();
      chunk.shared[1] = chunk.shared[0] + v.padded_mid_size();
      chunk.head_touched = touched.get() + c * flags;
      chunk.last_touched = chunk.head_touched + heads;
      chunks.push_back(chunk);
    }
  }

  // Sums one slice over the chunks that touched it; null if none did.
  T* reduce(const Kernels<T>& k, T* BackwardChunk<T>::*slices, uint8_t* BackwardChunk<T>::*flags,
            int64_t digit, int64_t size) const {
    T* sum = nullptr;
    for (const BackwardChunk<T>& chunk : chunks) {
      if (!(chunk.*flags)[digit]) continue;
      T* slice = chunk.*slices + digit * size;
      if (sum) {
        k.add(slice, size, sum);
      } else {
        sum = slice;
      }
    }
    return sum;
  }

  // Mid slices whose prefixes lie in more than one chunk.
  void finish_shared_mids(const Kernels<T>& k) const {
    const TableView<T>& v = table->view;
    int64_t mid = -1;
    T* sum = nullptr;
    const auto flush = [&] {
      if (!sum) return;
      k.update(updates[table->shape.num_cores - 2], mid * v.mid_size(), sum, v.r_head * v.n_mid, v.rank,
               v.ld_rank);
      sum = nullptr;
    };
    for (const BackwardChunk<T>& chunk : chunks) {
      for (int side = 0; side < 2; side++) {
        const int64_t shared = side == 0 ? chunk.shared_first : chunk.shared_last;
        if (shared < 0 || (side == 1 && shared == chunk.shared_first)) continue;
        if (sum && shared == mid) {
          k.add(chunk.shared[side], v.padded_mid_size(), sum);
        } else {
          flush();
          mid = shared;
          sum = chunk.shared[side];
        }
      }
    }
    flush();
  }

  void finish_last(const Kernels<T>& k, int64_t digit, T* scratch) const {
    const TableView<T>& v = table->view;
    const T* sum = reduce(k, &BackwardChunk<T>::last, &BackwardChunk<T>::last_touched, digit,
                          v.padded_last_size());
    if (!sum) return;
    k.restore_last(v, sum, scratch);
    const int64_t size = v.rank * v.n_last;
    k.update(updates[table->shape.num_cores - 1], digit * size, scratch, 1, size, size);
  }

  void finish_head(const Kernels<T>& k, int64_t digit) const {
    const int64_t size = table->view.head_size();
    const T* sum =
        reduce(k, &BackwardChunk<T>::head, &BackwardChunk<T>::head_touched, digit, size);
    if (sum) k.update(updates[0], digit * size, sum, 1, size, size);
  }

  // 4 cores: the heads' gradients go on to cores 0 and 1, each slice's terms in ascending order.
  void finish_head_pairs(const Kernels<T>& k) const {
    const HeadPair<T>& pair = table->pair;
    const std::vector<int64_t>& digits = table->head_digits;
    const int64_t num_heads = static_cast<int64_t>(digits.size());
    std::vector<const T*> grads(num_heads);
    for_each_job<T>(num_heads, 0, [&](int64_t h, T*) {
      grads[h] = reduce(k, &BackwardChunk<T>::head, &BackwardChunk<T>::head_touched, h,
                        pair.head_size());
    });
    std::vector<std::vector<int64_t>> of0(table->shape.m[0]), of1(pair.m1);
    for (int64_t h = 0; h < num_heads; h++) {
      of0[digits[h] / pair.m1].push_back(h);
      of1[digits[h] % pair.m1].push_back(h);
    }
    const int64_t size0 = pair.size0(), size1 = pair.size1();
    const Buffer<T> grad0 = buffer<T>(of0.size() * size0), grad1 = buffer<T>(of1.size() * size1);
    const auto sum = [&](const std::vector<std::vector<int64_t>>& of, T* grad, int64_t size,
                         auto head_grad) {
      for_each_job<T>(of.size(), pair.scratch(), [&](int64_t i, T* scratch) {
        std::fill_n(grad + i * size, of[i].empty() ? 0 : size, T(0));
        for (int64_t h : of[i]) head_grad(pair, digits[h], grads[h], grad + i * size, scratch);
      });
    };
    sum(of0, grad0.get(), size0, k.head_grad0);
    sum(of1, grad1.get(), size1, k.head_grad1);
    const auto apply = [&](const std::vector<std::vector<int64_t>>& of, const T* grad, int64_t size,
                           const CoreUpdate<T>& step) {
      for_each_job<T>(of.size(), 0, [&](int64_t i, T*) {
        if (!of[i].empty()) k.update(step, i * size, grad + i * size, 1, size, size);
      });
    };
    apply(of0, grad0.get(), size0, updates[0]);
    apply(of1, grad1.get(), size1, updates[1]);
  }
};

// Weights' gradients of the indices whose rows are cached: the cores' chunks do not see them.
template <typename T>
void cached_weight_gradients(const Call<T>& call, const GradView<T>& grad) {
  for (size_t t = 0; t < call.tables.size(); t++) {
    const CallCache& cache = call.caches[t];
    const int64_t jobs = (cache.end_row - cache.first_row + kRowsPerJob - 1) / kRowsPerJob;
    const int64_t dim = call.shapes[t].embedding_dim();
    for_each_job<T>(jobs, dim, [&](int64_t job, T* scratch) {
      const int64_t begin = cache.first_row + job * kRowsPerJob;
      call.k.cached_weight_gradients(call.rows_view(t, nullptr), dim, call.plan, grad, begin,
                                     std::min(cache.end_row, begin + kRowsPerJob), scratch);
    });
  }
}

// Runs every chunk, then the reductions; `updates`, one per core, say what a gradient becomes.
template <typename T>
void backward(const Call<T>& call, const GradView<T>& grad,
              const std::vector<CoreUpdate<T>>& updates) {
  std::vector<TableGrads<T>> grads;
  std::vector<std::pair<int64_t, int64_t>> jobs;  // (place in grads, chunk), then (.., slices)
  const std::vector<Chunk> all = call.chunks();
  int64_t scratch_size = 0;
  for (auto first = all.begin(); first != all.end();) {
    const auto end = std::find_if(first, all.end(),
                                  [&](const Chunk& c) { return c.table != first->table; });
    const CallTable<T>& table = call.tables[first->table];
    grads.emplace_back(table, call.plan, std::vector<Chunk>(first, end));
    grads.back().updates = updates.data() + table.first_core;
    for (int64_t c = 0; c < end - first; c++) jobs.push_back({grads.size() - 1, c});
    scratch_size = std::max(scratch_size, ChunkScratch<T>(table.view, true).size);
    first = end;
  }
  for_each_job<T>(jobs.size(), scratch_size, [&](int64_t job, T* scratch) {
    const TableGrads<T>& g = grads[jobs[job].first];
    const CoreUpdate<T>& mid = g.updates[g.table->shape.num_cores - 2];
    call.k.backward(g.table->view, call.plan, grad, mid, g.chunks[jobs[job].second], scratch);
  });

  jobs.clear();
  scratch_size = 0;
  for (size_t i = 0; i < grads.size(); i++) {
    const TableView<T>& v = grads[i].table->view;
    grads[i].finish_shared_mids(call.k);
    const bool four = grads[i].table->shape.num_cores == 4;
    if (four) grads[i].finish_head_pairs(call.k);
    const int64_t slices = v.m_last + (four ? 0 : grads[i].table->num_heads());
    for (int64_t s = 0; s < slices; s += kSlicesPerJob) jobs.push_back({i, s});
    scratch_size = std::max(scratch_size, v.rank * v.n_last);
  }
  for_each_job<T>(jobs.size(), scratch_size, [&](int64_t job, T* scratch) {
    const TableGrads<T>& g = grads[jobs[job].first];
    const int64_t m_last = g.table->view.m_last;
    const int64_t slices =
        m_last + (g.table->shape.num_cores == 4 ? 0 : g.table->num_heads());
    const int64_t begin = jobs[job].second, end = std::min(slices, begin + kSlicesPerJob);
    for (int64_t s = begin; s < end; s++) {
      if (s < m_last) {
        g.finish_last(call.k, s, scratch);
      } else {
        g.finish_head(call.k, s - m_last);
      }
    }
  });
  if (grad.grad_weights) cached_weight_gradients(call, grad);
}

template <typename T>
Tensor empty_weights_grad(const Call<T>& call, bool weights_grad) {
  return torch::stable::empty({weights_grad ? call.num_indices : 0}, kScalarType<T>);
}

Tensor embedding_bag_forward(const Tensors& plan, const Tensors& cores, const Tensors& cached_rows,
                             const Tensor& offsets, const MaybeTensor& per_sample_weights,
                             const Ints& tables, const Ints& feature_tables, std::string pooling,
                             std::string /*precision*/) {
  return dispatch(cores, [&](auto zero) {
    using T = decltype(zero);
    return forward(Call<T>(plan, cores, cached_rows, offsets, per_sample_weights, tables,
                           feature_tables, pooling));
  }, /*takes_int8=*/true);
}

std::tuple<Tensors, Tensor> embedding_bag_backward_dense(
    const Tensor& grad_output, const Tensors& plan, const Tensors& cores,
    const Tensors& cached_rows, const Tensor& offsets, const MaybeTensor& per_sample_weights,
    const Ints& tables, const Ints& feature_tables, std::string pooling, bool weights_grad,
    std::string /*precision*/, bool /*deterministic*/) {
  return dispatch(cores, [&](auto zero) {
    using T = decltype(zero);
    const Call<T> call(plan, cores, cached_rows, offsets, per_sample_weights, tables,
                       feature_tables, pooling);
    Tensor grad_weights = empty_weights_grad(call, weights_grad);
    const OutputGradient<T> grad(call, grad_output, weights_grad ? data<T>(grad_weights) : nullptr);
    Tensors grad_cores;
    for (const Tensor& core : cores) {
      grad_cores.push_back(
          torch::stable::new_zeros(core, {core.size(0), core.size(1)}, kScalarType<T>));
    }
    std::vector<CoreUpdate<T>> updates(cores.size());
    for (size_t i = 0; i < cores.size(); i++) updates[i].grad = data<T>(grad_cores[i]);
    backward(call, grad.view, updates);
    return std::tuple<Tensors, Tensor>(grad_cores, grad_weights);
  });
}

Tensor embedding_bag_backward_update(const Tensor& grad_output, const Tensors& plan,
                                     const Tensors& cores, const Tensors& states,
                                     const Tensors& cached_rows, const Tensor& offsets,
                                     const MaybeTensor& per_sample_weights, const Ints& tables,
                                     const Ints& feature_tables, std::string pooling,
                                     bool weights_grad, std::string optimizer,
                                     double learning_rate, double eps, const Ints& rounding_seeds,
                                     std::string /*precision*/, bool /*deterministic*/) {
  TT_CHECK(optimizer != "adam",
           "optimizer must leave slices without a gradient alone, got adam: use step_cores");
  OptimizerSettings settings;
  settings.name = std::move(optimizer);
  settings.learning_rate = learning_rate;
  settings.eps = eps;
  settings.rounding_seeds = rounding_seeds;
  return dispatch(cores, [&](auto zero) {
    using T = decltype(zero);
    const Call<T> call(plan, cores, cached_rows, offsets, per_sample_weights, tables,
                       feature_tables, pooling);
    Tensor grad_weights = empty_weights_grad(call, weights_grad);
    const OutputGradient<T> grad(call, grad_output, weights_grad ? data<T>(grad_weights) : nullptr);
    backward(call, grad.view, settings.updates<T>(cores, states));
    return grad_weights;
  });
}

std::string cpu_isa() { return isa(); }

// Of one core, in GFLOP/s: the best of some short runs, as others may be at work.
double cpu_peak_gflops() {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kRounds = 100'000;
  const Kernels<float>& k = kernels<float>();
  double best = 0;
  volatile float kept;
  for (int run = 0; run < 20; run++) {
    const auto begin = Clock::now();
    kept = k.multiply_adds(kRounds);
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    best = std::max(best, 2e-9 * kRounds * kSumsOfPeak * k.width / seconds);
  }
  static_cast<void>(kept);
  return best;
}

}  // namespace
}  // namespace torchrec_tt

STABLE_TORCH_LIBRARY_IMPL(torchrec_tt, CPU, m) {
  m.impl("embedding_bag_forward", TORCH_BOX(&torchrec_tt::embedding_bag_forward));
  m.impl("embedding_bag_backward_dense", TORCH_BOX(&torchrec_tt::embedding_bag_backward_dense));
  m.impl("embedding_bag_backward_update", TORCH_BOX(&torchrec_tt::embedding_bag_backward_update));
}

STABLE_TORCH_LIBRARY_IMPL(torchrec_tt, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&torchrec_tt::cpu_isa));
  m.impl("cpu_peak_gflops", TORCH_BOX(&torchrec_tt::cpu_peak_gflops));
}
