#include "call.h"

#include <algorithm>
#include <ranges>

namespace torchrec_tt {
namespace {

constexpr double kFlopsPerChunk = 24e6;  // of the forward: 0.4 ms, and 1.5 ms of the backward
constexpr int64_t kMaxChunks = 16;      // of a table: each has its own sums for two cores

std::vector<int64_t> read_offsets(const Tensor& tensor) {
  std::vector<int64_t> offsets(tensor.numel());
  TT_CHECK(tensor.is_cpu() && tensor.is_contiguous(), "offsets must be contiguous and on the CPU");
  if (is_type(tensor, ScalarType::Long)) {
    std::copy_n(static_cast<const int64_t*>(tensor.const_data_ptr()), offsets.size(),
                offsets.begin());
  } else {
    TT_CHECK(is_type(tensor, ScalarType::Int), "offsets must be int32 or int64, got ",
             tensor.scalar_type());
    std::copy_n(static_cast<const int32_t*>(tensor.const_data_ptr()), offsets.size(),
                offsets.begin());
  }
  return offsets;
}

template <typename T>
void find_heads(CallTable<T>& table, const PlanView& plan, const Kernels<T>& k) {
  const TTShape& s = table.shape;
  std::vector<int64_t> digits;
  for (int64_t q = table.first_prefix; q < table.end_prefix; q++) {
    const int64_t key = plan.row_keys[plan.prefix_starts[q]] - s.key_base;
    digits.push_back(key / s.m_last() % s.m_head());
  }
  std::vector<int64_t>& heads = table.head_digits;
  heads = digits;
  std::sort(heads.begin(), heads.end());
  heads.erase(std::unique(heads.begin(), heads.end()), heads.end());
  for (int64_t digit : digits) {
    table.head_at.push_back(static_cast<int32_t>(
        std::lower_bound(heads.begin(), heads.end(), digit) - heads.begin()));
  }
  table.pair = {s.n[0],         s.r[1],         s.n[1],       s.r[2], s.m[1],
                table.cores[0], table.cores[1], table.storage};
  table.heads = buffer<T>(heads.size() * table.pair.head_size());
  for_each_job<T>(heads.size(), table.pair.scratch(), [&](int64_t h, T* scratch) {
    k.head_forward(table.pair, heads[h], table.heads.get() + h * table.pair.head_size(), scratch);
  });
  table.view.head = table.heads.get();
  table.view.head_storage = Storage::kNative;
  table.view.head_at = table.head_at.data() - table.first_prefix;
}

template <typename T>
void make_view(CallTable<T>& table, const PlanView& plan, const Kernels<T>& k) {
  const TTShape& s = table.shape;
  TableView<T>& v = table.view;
  const int d = s.num_cores;
  v = {};
  v.has_mid = d > 2;
  v.storage = v.head_storage = table.storage;
  v.n_head = d == 4 ? s.n[0] * s.n[1] : s.n[0];
  v.n_mid = d > 2 ? s.n[d - 2] : 1;
  v.rank = s.rank();
  v.r_head = d > 2 ? s.r[d - 2] : v.rank;
  v.ld_rank = round_up(v.rank, k.width);
  v.ld_head = round_up(v.r_head, k.width);
  v.n_last = s.n_last();
  v.m_rows = v.n_head * v.n_mid;
  v.m_head = s.m_head();
  v.m_mid = s.m_mid();
  v.m_last = s.m_last();
  v.key_base = s.key_base;
  v.head = table.cores[0];
  v.mid = d > 2 ? table.cores[d - 2] : nullptr;
  v.last = table.cores[d - 1];
  if (d == 4) find_heads(table, plan, k);
  if (2 * (table.end_row - table.first_row) >= v.m_last) {
    table.last_transposed = buffer<T>(v.m_last * v.padded_last_size());
    for_each_job<T>((v.m_last + 255) / 256, v.rank * v.n_last, [&](int64_t job, T* scratch) {
      const int64_t begin = job * 256, end = std::min(v.m_last, begin + 256);
      k.transpose_last(v, begin, end,
                       table.last_transposed.get() + begin * v.padded_last_size(), scratch);
    });
    v.last_transposed = table.last_transposed.get();
  }
}

template <typename T>
void take_cores(CallTable<T>& table, const std::vector<Tensor>& cores, size_t first) {
  table.storage = storage_of<T>(cores[0]);
  for (int k = 0; k < table.shape.num_cores; k++) {
    TT_CHECK(first + k < cores.size(), "cores must hold every core of every table, got ",
             cores.size());
    const Tensor& core = cores[first + k];
    TT_CHECK(core.is_cpu() && core.is_contiguous() && is_type(core, cores[0].scalar_type()),
             "cores must be contiguous, on the CPU and of one dtype, core ", first + k, " is not");
    const bool has_scales = table.storage == Storage::kInt8;
    const int64_t size = table.shape.slice_size(k) + (has_scales ? kScaleBytes : 0);
    TT_CHECK(core.dim() == 2 && core.size(0) == table.shape.m[k] && core.size(1) == size,
             "cores must be [m_k, r_k * n_k * r_{k+1}", has_scales ? " + 4" : "", "], core ",
             first + k, " must be [", table.shape.m[k], ", ", size, "]");
    table.cores.push_back(core.mutable_data_ptr());
  }
}

// Sizes and dtypes only: the values are those of the operator `plan`.
void check_plan(const std::vector<Tensor>& plan) {
  constexpr ScalarType kInt = ScalarType::Int, kLong = ScalarType::Long;
  TT_CHECK(plan.size() == 6, "plan must hold 6 tensors, got ", plan.size());
  const int64_t n = plan[0].numel();
  const ScalarType types[] = {kInt, kInt, kLong, kInt, kInt, kLong};
  const int64_t sizes[] = {n, n, n, n + 1, n + 1, 4};
  for (int i = 0; i < 6; i++) {
    TT_CHECK(plan[i].is_cpu() && plan[i].is_contiguous() && plan[i].numel() == sizes[i] &&
                 is_type(plan[i], types[i]),
             "plan must hold what the operator plan gives, tensor ", i, " must be contiguous, on the CPU, ",
             types[i], " and of ", sizes[i], " elements");
  }
}

}  // namespace

template <typename T>
Bags<T>::Bags(const Tensors& plan_tensors, const Tensor& offsets_tensor,
              const MaybeTensor& per_sample_weights, const Ints& tables_flat,
              const Ints& feature_tables, const std::string& pooling)
    : shapes(decode_tables(tables_flat)),
      features(feature_tables, shapes, offsets_tensor.numel()),
      offsets(read_offsets(offsets_tensor)) {
  check_plan(plan_tensors);
  TT_CHECK(pooling == "sum" || pooling == "mean" || pooling == "none",
           "pooling must be sum, mean or none, got ", pooling);
  is_mean = pooling == "mean";
  is_pooled = pooling != "none";
  plan = {static_cast<const int32_t*>(plan_tensors[0].const_data_ptr()),
          static_cast<const int32_t*>(plan_tensors[1].const_data_ptr()),
          static_cast<const int64_t*>(plan_tensors[2].const_data_ptr()),
          static_cast<const int32_t*>(plan_tensors[3].const_data_ptr()),
          static_cast<const int32_t*>(plan_tensors[4].const_data_ptr()),
          plan_tensors[0].numel()};
  num_indices = plan_tensors[0].numel();
  const auto* counts = static_cast<const int64_t*>(plan_tensors[5].const_data_ptr());
  num_rows = counts[0];
  num_tt_rows = counts[1];
  num_prefixes = counts[2];
  check_offsets(offsets.data(), static_cast<int64_t>(offsets.size()), num_indices);
  if (per_sample_weights) {
    TT_CHECK(per_sample_weights->numel() == num_indices, "per_sample_weights must have ",
             num_indices, " entries like indices, got ", per_sample_weights->numel());
    TT_CHECK(per_sample_weights->is_cpu() && per_sample_weights->is_contiguous() &&
                 is_type(*per_sample_weights, kScalarType<T>),
             "per_sample_weights must be contiguous, on the CPU and ", kScalarType<T>);
    weights = static_cast<const T*>(per_sample_weights->const_data_ptr());
  }
  for (const TTShape& shape : shapes) {
    TT_CHECK(is_pooled || shape.embedding_dim() == dim(),
             "tables must have one embedding_dim for pooling none, got ", dim(), " and ",
             shape.embedding_dim());
  }
}

template <typename T>
std::vector<CallCache> find_caches(const Bags<T>& bags, const Tensors& per_table,
                                   const char* name) {
  const size_t num_tables = bags.shapes.size();
  TT_CHECK(per_table.empty() || per_table.size() == num_tables, name,
           " must have one tensor per table, ", num_tables, ", or none, got ", per_table.size());
  std::vector<CallCache> caches(num_tables);
  int64_t key_base = bags.shapes.back().key_base + bags.shapes.back().padded_rows();
  for (size_t t = 0; t < num_tables; t++) {
    const bool has_cache = !per_table.empty() && per_table[t].numel() > 0;
    CallCache& cache = caches[t];
    cache.num_slots = has_cache ? per_table[t].size(0) : 0;
    cache.key_base = key_base;
    cache.first_row = bags.row_at(key_base);
    key_base += cache.num_slots;
    cache.end_row = bags.row_at(key_base);
  }
  TT_CHECK(caches.back().end_row == bags.num_rows, name,
           " must be of the caches that the plan was made with, got ",
           caches.back().key_base + caches.back().num_slots - caches.front().key_base, " slots");
  return caches;
}

template <typename T>
void take_rows(CallCache& cache, const Bags<T>& bags, const Tensor& rows, size_t t) {
  if (rows.numel() == 0) return;
  const bool is_half = is_type(rows, ScalarType::BFloat16) || is_type(rows, ScalarType::Half);
  TT_CHECK(is_type(rows, kScalarType<T>) || (sizeof(T) == 4 && is_half), "cached_rows must be ",
           sizeof(T) == 4 ? "float32, bfloat16 or float16" : "float64 like the cores", ", got ",
           rows.scalar_type(), " for table ", t);
  const int64_t dim = bags.shapes[t].embedding_dim();
  TT_CHECK(rows.is_cpu() && rows.is_contiguous() && rows.dim() == 2 &&
               rows.size(0) == cache.num_slots && rows.size(1) == dim,
           "cached_rows must be contiguous, on the CPU and [", cache.num_slots, ", ", dim,
           "] for table ", t);
  cache.rows = rows.mutable_data_ptr();
  cache.storage = storage_of<T>(rows);
}

template <typename T>
Call<T>::Call(const Tensors& plan_tensors, const Tensors& cores, const Tensors& cached_rows,
              const Tensor& offsets_tensor, const MaybeTensor& per_sample_weights,
              const Ints& tables_flat, const Ints& feature_tables, const std::string& pooling)
    : Bags<T>(plan_tensors, offsets_tensor, per_sample_weights, tables_flat, feature_tables,
              pooling),
      caches(find_caches(*this, cached_rows, "cached_rows")) {
  for (size_t t = 0; t < cached_rows.size(); t++) take_rows(caches[t], *this, cached_rows[t], t);
  tables.resize(this->shapes.size());
  size_t first_core = 0;
  const auto prefix_at = [&](int64_t row) {
    return std::lower_bound(plan.prefix_starts, plan.prefix_starts + this->num_prefixes, row) -
           plan.prefix_starts;
  };
  for (size_t t = 0; t < tables.size(); t++) {
    CallTable<T>& table = tables[t];
    table.shape = this->shapes[t];
    table.first_core = first_core;
    take_cores(table, cores, first_core);
    first_core += table.shape.num_cores;
    table.first_row = this->row_at(table.shape.key_base);
    table.end_row = this->row_at(table.shape.key_base + table.shape.padded_rows());
    table.first_prefix = prefix_at(table.first_row);
    table.end_prefix = prefix_at(table.end_row);
    if (table.first_row < table.end_row) make_view(table, plan, k);
  }
  TT_CHECK(first_core == cores.size(), "cores must hold ", first_core, " tensors, got ",
           cores.size());
}

// Where the bag of each sorted position's index begins in the output's gradient.
template <typename T>
static Buffer<int64_t> gradient_places(const Bags<T>& bags) {
  const int64_t n = bags.num_indices;
  const int32_t* order = bags.plan.order;
  Buffer<int64_t> sorted_at = buffer<int64_t>(n);
  if (!bags.is_pooled) {
    for (int64_t s = 0; s < n; s++) sorted_at[s] = order[s] * bags.dim();
    return sorted_at;
  }
  const Buffer<int64_t> at = buffer<int64_t>(n);
  const Features& features = bags.features;
  const int64_t* begin = bags.offsets.data();  // of the feature's bags
  for (size_t f = 0; f < features.table.size(); f++) {
    int64_t column = features.column[f];
    for (int64_t b = 0; b < features.batch_size; b++, begin++, column += features.num_columns) {
      for (int64_t i = begin[0]; i < begin[1]; i++) at[i] = column;
    }
  }
  for (int64_t s = 0; s < n; s++) sorted_at[s] = at[order[s]];
  return sorted_at;
}

template <typename T>
OutputGradient<T>::OutputGradient(const Bags<T>& bags, const Tensor& grad_output, T* grad_weights)
    : sorted_at(gradient_places(bags)),
      scale(bags.scales(true)),
      weight_scale(grad_weights ? bags.scales(false) : nullptr) {
  TT_CHECK(grad_output.dim() == 2 && grad_output.size(0) == bags.output_rows() &&
               grad_output.size(1) == bags.output_columns(),
           "grad_output must be [", bags.output_rows(), ", ", bags.output_columns(), "]");
  TT_CHECK(grad_output.is_cpu() && grad_output.is_contiguous() &&
               is_type(grad_output, kScalarType<T>),
           "grad_output must be contiguous, on the CPU and ", kScalarType<T>);
  view = {static_cast<const T*>(grad_output.const_data_ptr()), sorted_at.get(), scale.get(),
          weight_scale.get(), grad_weights};
}

template <typename T>
std::vector<Chunk> Call<T>::chunks() const {
  std::vector<Chunk> result;
  for (size_t t = 0; t < tables.size(); t++) {
    const CallTable<T>& table = tables[t];
    if (table.first_row == table.end_row) continue;
    const TableView<T>& v = table.view;
    const double per_prefix = v.has_mid ? 2.0 * v.m_rows * v.r_head * v.ld_rank : 0;
    const double per_row = 2.0 * v.dim() * v.ld_rank;
    const auto cost = [&](int64_t q) {
      return per_prefix * (q - table.first_prefix) +
             per_row * (plan.prefix_starts[q] - table.first_row);
    };
    const double total = cost(table.end_prefix);
    const int64_t count =
        std::clamp<int64_t>(static_cast<int64_t>(total / kFlopsPerChunk), 1, kMaxChunks);
    int64_t begin = table.first_prefix;
    for (int64_t c = 1; c <= count; c++) {
      const auto prefixes = std::views::iota(begin, table.end_prefix);
      const int64_t end =
          c == count ? table.end_prefix
                     : *std::ranges::lower_bound(prefixes, total * c / count, {}, cost);
      if (end > begin) result.push_back({static_cast<int64_t>(t), begin, end});
      begin = end;
    }
  }
  return result;
}

template <typename T>
Buffer<T> Bags<T>::scales(bool with_weights) const {
  const T* w = with_weights ? weights : nullptr;
  if (!w && !is_mean) return nullptr;
  Buffer<T> scale = buffer<T>(num_indices);
  for (size_t bag = 0; bag + 1 < offsets.size(); bag++) {
    const T over = is_mean ? T(1) / T(offsets[bag + 1] - offsets[bag]) : T(1);
    for (int64_t i = offsets[bag]; i < offsets[bag + 1]; i++) scale[i] = w ? w[i] * over : over;
  }
  return scale;
}

template struct Bags<float>;
template struct Bags<double>;
template struct Call<float>;
template struct Call<double>;
template struct OutputGradient<float>;
template struct OutputGradient<double>;
template std::vector<CallCache> find_caches(const Bags<float>&, const Tensors&, const char*);
template std::vector<CallCache> find_caches(const Bags<double>&, const Tensors&, const char*);
template void take_rows(CallCache&, const Bags<float>&, const Tensor&, size_t);
template void take_rows(CallCache&, const Bags<double>&, const Tensor&, size_t);

}  // namespace torchrec_tt
