// Steps the cached rows of a batch on their gradients, as rows: a row without an index stays.
#include <algorithm>

#include "call.h"
#include "optimizer.h"

namespace torchrec_tt {
namespace {

constexpr int64_t kRowsPerJob = 512;

struct Job {
  size_t table;
  int64_t begin, end;  // unique rows
};

// Cuts the stepped tables' cached rows into jobs.
std::vector<Job> make_jobs(const std::vector<CallCache>& caches) {
  std::vector<Job> jobs;
  for (size_t t = 0; t < caches.size(); t++) {
    const int64_t end = caches[t].rows ? caches[t].end_row : 0;
    for (int64_t u = caches[t].first_row; u < end; u += kRowsPerJob) {
      jobs.push_back({t, u, std::min(end, u + kRowsPerJob)});
    }
  }
  return jobs;
}

const int64_t* tags(const Tensor& ids) { return static_cast<const int64_t*>(ids.const_data_ptr()); }

template <typename T>
void step(const Bags<T>& bags, const GradView<T>& grad, const Tensors& cache_ids,
          const Tensors& cached_rows, const Tensors& states, const OptimizerSettings& settings) {
  std::vector<CallCache> caches = find_caches(bags, cache_ids, "cache_ids");
  TT_CHECK(cached_rows.size() == cache_ids.size(), "cached_rows must have one tensor per table, ",
           cache_ids.size(), ", got ", cached_rows.size());
  Tensors stepped;
  std::vector<size_t> place(caches.size());  // of a table in `stepped`
  for (size_t t = 0; t < cached_rows.size(); t++) {
    check_cache_ids(cache_ids[t], t);
    take_rows(caches[t], bags, cached_rows[t], t);
    place[t] = stepped.size();
    if (caches[t].rows) stepped.push_back(cached_rows[t]);
  }
  const std::vector<CoreUpdate<T>> updates = settings.updates<T>(stepped, states);
  const std::vector<Job> jobs = make_jobs(caches);
  for_each_job<T>(jobs.size(), bags.max_dim(), [&](int64_t i, T* scratch) {
    const Job& job = jobs[i];
    const CachedSlots slots{tags(cache_ids[job.table]), caches[job.table].key_base};
    bags.k.step_rows(updates[place[job.table]], slots, bags.shapes[job.table].embedding_dim(),
                     bags.plan, grad, job.begin, job.end, scratch);
  });
}

void step_cached_rows(const Tensor& grad_output, const Tensors& plan, const Tensors& cache_ids,
                      const Tensors& cached_rows, const Tensors& states, const Tensor& offsets,
                      const MaybeTensor& per_sample_weights, const Ints& tables,
                      const Ints& feature_tables, std::string pooling, std::string optimizer,
                      double learning_rate, double eps, double beta1, double beta2,
                      double weight_decay, bool decoupled_weight_decay,
                      const Ints& rounding_seeds) {
  const OptimizerSettings settings{std::move(optimizer), learning_rate, eps, beta1, beta2,
                                   weight_decay, decoupled_weight_decay, rounding_seeds};
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const Bags<T> bags(plan, offsets, per_sample_weights, tables, feature_tables, pooling);
    const OutputGradient<T> grad(bags, grad_output);
    step(bags, grad.view, cache_ids, cached_rows, states, settings);
  };
  is_type(grad_output, ScalarType::Double) ? run(double{}) : run(float{});
}

}  // namespace
}  // namespace torchrec_tt

STABLE_TORCH_LIBRARY_IMPL(torchrec_tt, CPU, m) {
  m.impl("step_cached_rows", TORCH_BOX(&torchrec_tt::step_cached_rows));
}
