// Gradients of heads, mid and last slices, over the forward's plan. Per prefix P again; per unique
// row, with R its summed gradient:  grad last += P^T R,  grad P += R last^T;  then per prefix
// grad mid += head^T grad P,  grad head += grad P mid^T.
#include "backward.cuh"

#include <climits>
#include <optional>

#include "cached_rows.cuh"
#include "ordered_sums.h"

namespace torchrec_tt::cuda {
namespace {

// Takes the gradients of rows [first, first + count), [m_rows, n_last] each; one warp takes a row.
__device__ void load_row_grads(const Call& call, const BackwardCall& b, const BatchState& s, int first,
                               int count, float* memory) {
  const Table& t = s.table.table;
  const BlockLayout& at = s.table.at;
  const int columns = round_up_to(t.n_last, 4);
  for (int row = threadIdx.x / 32; row < count; row += kWarps) {
    float* out = memory + at.row_grads + row * at.row_stride;
    for (int e = threadIdx.x % 32; e < t.m_rows() * columns; e += 32) {
      const int m = e / columns, z = e % columns;
      out[m * at.ld_last + z] =
          z < t.n_last ? row_gradient(b.row_grads, call.plan, first + row, m * t.n_last + z) : 0.0f;
    }
  }
}

// grad P [m_rows, rank] += R last^T over those of rows [first, first + count) that a prefix has.
__device__ void add_product_grads(const PrefixBatch& batch, const BatchState& s, int first, int count,
                                  float* memory) {
  const Table& t = s.table.table;
  const BlockLayout& at = s.table.at;
  const int stride = t.n_head * at.ld_product;
  const Product p{batch.count, t.m_rows(),    t.rank,         t.n_last, at.ld_last,
                  at.ld_last,  at.row_stride, at.last_stride, {}};
  float_product<true, true>(
      p,
      [&](int prefix) {
        const int begin = max(s.starts[prefix] - first, 0), end = min(s.ends[prefix] - first, count);
        return Factors{memory + at.row_grads + begin * at.row_stride,
                       memory + at.lasts + begin * at.last_stride, end - begin};
      },
      [&](int prefix, int m, int column, int step, const auto& values) {
        float* out = memory + at.grad_products + prefix * stride + m * at.ld_rank;
        for_columns(values, column, step, t.rank, [&](int c, float v) { out[c] += v; });
      });
}

// grad last [rank, n_last] = P^T R of every row, in the place of its last slice.
__device__ void make_last_grads(const BatchState& s, int count, float* memory) {
  const Table& t = s.table.table;
  const BlockLayout& at = s.table.at;
  const Product p{count, t.rank, t.n_last, t.m_rows(), at.ld_rank, at.ld_last, 0, 0, {at.ld_last, 0}};
  float_product<false, false>(
      p,
      [&](int row) {
        return Factors{product_of(s, s.prefix_of_row[row], memory),
                       memory + at.row_grads + row * at.row_stride, 1};
      },
      [&](int row, int m, int column, int step, const auto& values) {
        float* out = memory + at.lasts + row * at.last_stride + m * at.ld_last;
        for_columns(values, column, step, t.n_last, [&](int c, float v) { out[c] = v; });
      });
}

__device__ void touch(const BackwardCall& b, int64_t slice) {
  if (b.touched) atomicExch(b.touched + slice, 1);
}

// Leaves the gradients of the rows' last slices; one warp takes a row.
__device__ void leave_last_grads(const BackwardCall& b, const BatchState& s, int first, int count,
                                 const float* memory) {
  const Table& t = s.table.table;
  const BlockLayout& at = s.table.at;
  const int lane = threadIdx.x % 32, core = t.last_core();
  for (int row = threadIdx.x / 32; row < count; row += kWarps) {
    const float* from = memory + at.lasts + row * at.last_stride;
    const int64_t digit = s.last_digit[row];
    const int64_t item = first + row - b.ordered.first_row;
    float* grad = b.is_ordered ? b.ordered.terms + item * b.ordered.ld
                               : t.grads[core] + digit * t.last_size();
    for (int e = lane; e < t.last_size(); e += 32) {
      const float value = from[e / t.n_last * at.ld_last + e % t.n_last];
      if (b.is_ordered) {
        grad[e] = value;
      } else {
        atomicAdd(grad + e, value);
      }
    }
    if (lane != 0) continue;
    if (b.is_ordered) {
      b.ordered.targets[item] = static_cast<uint32_t>(t.first_target + digit);
    } else {
      touch(b, t.first_slice[core] + digit);
    }
  }
}

// grad mid [r_head, n_mid, rank], = or += head^T grad P over the batch; grad heads [n_head, r_head]
// = grad P mid^T, in the place of the products.
template <Precision kPrecision>
__device__ void make_mid_grads(const PrefixBatch& batch, const BatchState& s, bool is_first,
                               float* memory) {
  const Table& t = s.table.table;
  const BlockLayout& at = s.table.at;
  const int rows = batch.count * t.n_head, width = t.n_mid * at.k_rank;
  const float* grad_products = memory + at.grad_products;
  float* grad_mid = memory + at.grad_mid;
  const Product of_mid{1,      t.r_head, width, rows, at.ld_head, at.ld_product, 0, 0,
                       {at.k_rank, at.ld_rank}};
  mid_product<kPrecision, false, false, 4>(
      of_mid, [&](int) { return Factors{memory + at.heads, grad_products, 1}; },
      [&](int, int row, int column, int step, const auto& values) {
        float* out = grad_mid + row * at.ld_mid;
        for_columns(values, column, step, width,
                    [&](int c, float v) { out[c] = is_first ? v : out[c] + v; });
      });
  float* grad_heads = memory + at.products;
  const Product of_heads{1,         rows,       t.r_head,  at.k_rank, at.ld_product,
                         at.ld_mid, at.ld_rank, at.k_rank, {}};
  mid_product<kPrecision, true, true, 1>(
      of_heads, [&](int) { return Factors{grad_products, memory + at.mid, t.n_mid}; },
      [&](int, int row, int column, int step, const auto& values) {
        float* out = grad_heads + row * at.ld_head;
        for_columns(values, column, step, t.r_head, [&](int c, float v) { out[c] = v; });
      });
}

// Where gradients of a head are summed.
__device__ float* head_grad_at(const BackwardCall& b, const Table& t, int64_t place) {
  return (t.num_cores == 4 ? b.grad_heads + t.heads_at : t.grads[0]) + place * t.head_size();
}

__device__ void leave_head_grads(const BackwardCall& b, const PrefixBatch& batch, const BatchState& s,
                                 int first_prefix, const float* memory) {
  const Table& t = s.table.table;
  const BlockLayout& at = s.table.at;
  const float* grads = memory + (t.has_mid ? at.products : at.grad_products);
  const int ld = t.has_mid ? at.ld_head : at.ld_rank, size = t.head_size();
  for (int e = threadIdx.x; e < batch.count * size; e += kThreads) {
    const int prefix = e / size, x = e % size / t.r_head, a = e % t.r_head;
    const float value = grads[(prefix * t.n_head + x) * ld + a];
    const int64_t place = s.head[prefix];
    const int64_t item = b.ordered.num_rows + batch.first + prefix - first_prefix;
    if (b.is_ordered) {
      b.ordered.terms[item * b.ordered.ld + e % size] = value;
    } else {
      atomicAdd(head_grad_at(b, t, place) + e % size, value);
    }
    if (e % size != 0) continue;
    if (b.is_ordered) {
      b.ordered.targets[item] = static_cast<uint32_t>(t.first_target + t.m_last + place);
    } else if (t.num_cores != 4) {
      touch(b, t.first_slice[0] + place);
    }
  }
}

__device__ void leave_mid_grad(const BackwardCall& b, const PrefixBatch& batch, const BatchState& s,
                               bool is_owner, const float* memory) {
  const Table& t = s.table.table;
  const BlockLayout& at = s.table.at;
  const int core = t.mid_core(), width = t.n_mid * t.rank;
  float* grad = t.grads[core] + batch.mid * t.mid_size();
  for (int row = threadIdx.x / 32; row < t.r_head; row += kWarps) {
    const float* from = memory + at.grad_mid + row * at.ld_mid;
    for (int c = threadIdx.x % 32; c < width; c += 32) {
      const float value = from[c / t.rank * at.k_rank + c % t.rank];
      if (b.is_ordered) {
        grad[row * width + c] += value;  // of an earlier turn
      } else if (is_owner) {
        grad[row * width + c] = value;  // no other block has this group
      } else {
        atomicAdd(grad + row * width + c, value);
      }
    }
  }
  if (threadIdx.x == 0) touch(b, t.first_slice[core] + batch.mid);
}

// Sums the rows of the batch that lie in [first_row, end_row) into grad P and the last slices.
__device__ void take_rows(const Call& call, const BackwardCall& b, const PrefixBatch& batch,
                          BatchState& s, int first_row, int end_row, float* memory) {
  const BlockLayout& at = s.table.at;
  for (int i = threadIdx.x; i < at.head_rows * at.ld_product; i += kThreads) {
    memory[at.grad_products + i] = 0;
  }
  for (int u = first_row; u < end_row; u += at.rows) {
    const int count = min(at.rows, end_row - u);
    if (u > first_row) __syncthreads();  // others may still leave the last rows' gradients
    load_lasts(call, s, u, count, memory);
    load_row_grads(call, b, s, u, count, memory);
    __syncthreads();
    add_product_grads(batch, s, u, count, memory);
    __syncthreads();  // their last slices are overwritten
    make_last_grads(s, count, memory);
    __syncthreads();
    leave_last_grads(b, s, u, count, memory);
  }
}

// One block a job: a window of prefixes or its groups, always in deterministic sums. Moves what the forward
// moves and the gradient of every index; leaves a last slice per unique row, a head slice per prefix
// and a mid slice per group of a job.
template <Precision kPrecision, bool kInShared>
__global__ void __launch_bounds__(kThreads, kInShared ? kFewBlocks : 1)
    make_grads(Call call, BackwardCall b) {
  TT_DYN_SMEM(float, shared);
  TT_SHARED(BatchState, state, 1);
  BatchState& s = *state;
  float* memory = kInShared ? shared : call.scratch + blockIdx.x * call.scratch_stride;
  const int num_prefixes = static_cast<int>(call.plan.counts[2]);
  const int row_begin = b.ordered.first_row;
  const int row_end = static_cast<int>(
      min(call.plan.counts[1], int64_t{row_begin} + b.ordered.num_rows));
  if (row_begin >= row_end) return;
  Prefixes of_turn{0, num_prefixes};
  if (b.is_ordered) {
    of_turn = {prefix_of(call.plan, row_begin, num_prefixes),
               prefix_of(call.plan, row_end - 1, num_prefixes) + 1};
  }
  const int64_t size = window_size(call, num_prefixes);
  const bool is_owner = b.is_ordered || takes_groups(call, num_prefixes);
  PrefixBatch batch;
  for (int64_t job = blockIdx.x; of_turn.begin + job * size < of_turn.end; job += gridDim.x) {
    const Prefixes window = window_of(of_turn, job, size);
    const Prefixes range = is_owner ? whole_groups(call, window, of_turn) : window;
    bool is_first = true;  // of its group in this job
    for (int q = range.begin; q < range.end; q += batch.count) {
      take_prefixes(call, q, range.end, batch, s, memory);
      const Table& t = s.table.table;
      if (t.is_tiled != call.in_shared) continue;
      is_first = is_first || batch.is_first;
      make_products<kPrecision>(call, batch, s, memory);
      take_rows(call, b, batch, s, max(s.starts[0], row_begin), min(s.ends[batch.count - 1], row_end),
                memory);
      if (t.has_mid) {
        make_mid_grads<kPrecision>(batch, s, is_first, memory);
        __syncthreads();
      }
      leave_head_grads(b, batch, s, of_turn.begin, memory);
      const int next = q + batch.count;
      is_first = next >= range.end || first_key(call.plan, next) >= batch.group_end;
      if (t.has_mid && is_first) leave_mid_grad(b, batch, s, is_owner, memory);
    }
  }
}

// One row of blocks a core: gradients that are summed up begin with zeros, and those that may not occur
// where the step does not know it.
__global__ void __launch_bounds__(kThreads) clear_grads(Call call, BackwardCall b) {
  const Table& t = call.tables[blockIdx.y / kMaxCores].table;
  const int core = blockIdx.y % kMaxCores;
  if (core >= t.num_cores) return;
  const bool is_mid = t.has_mid && core == t.mid_core();
  const bool is_stored = is_mid && b.touched && !b.is_ordered &&
                         takes_groups(call, static_cast<int>(call.plan.counts[2]));
  const int size = core == t.last_core()        ? t.last_size()
                   : is_mid && !is_stored       ? t.mid_size()
                   : t.num_cores < 4 && !is_mid ? t.head_size()
                                                : 0;  // those are stored
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < t.m[core] * size;
       i += int64_t{gridDim.x} * kThreads) {
    t.grads[core][i] = 0;
  }
}

// A warp per index: its row times its bag's gradient.
__global__ void __launch_bounds__(kThreads, kManyBlocks)
    make_weight_grads(Call call, RowGradients g, const float* __restrict__ rows, int64_t ld_rows,
                      float* __restrict__ grad_weights) {
  const int lane = threadIdx.x % 32;
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  for (int64_t i = first; i < call.plan.num_indices; i += int64_t{gridDim.x} * kWarps) {
    const int u = call.plan.inverse[i];
    if (u >= call.plan.counts[0]) continue;  // no rows: wrong offsets
    const Table& t = call.tables[table_of_row(call, u)].table;
    const int64_t place = place_of_row(call.plan, u, ld_rows, t.cached_key, t.num_slots, t.dim());
    const float* grad = g.grad_output + g.grad_at[i];
    float sum = 0;
    for (int c = lane; c < t.dim(); c += 32) {
      sum += row_element(rows, t.cached_rows, t.cached_storage, place, c) * grad[c];
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) grad_weights[i] = g.weight_scale ? g.weight_scale[i] * sum : sum;
  }
}

struct BackwardMemory {
  Workspace workspace;
  CallMemory call;
  BagsMemory bags;
  BackwardCall b{};
  std::optional<OrderedSums> ordered;
  float* rows = nullptr;

  BackwardMemory(const Lookup& lookup, const Backward& backward, void* base)
      : workspace{static_cast<char*>(base)}, call(lookup, true, workspace), bags(lookup, workspace) {
    const int64_t n = lookup.plan.num_indices;
    const bool is_mean = lookup.pooling == Pooling::kMean;
    RowGradients& g = b.row_grads;
    g.grad_output = backward.grad_output;
    g.grad_at = workspace.take<int64_t>(n);
    if (lookup.weights || is_mean) g.scale = workspace.take<float>(n);
    if (backward.grad_weights && is_mean) g.weight_scale = workspace.take<float>(n);
    g.ld_pieces = call.max_dim;
    g.pieces = workspace.take<float>((n / kPiece + 1) * g.ld_pieces);
    b.grad_heads = workspace.take<float>(call.head_floats);
    b.touched = backward.touched;
    b.is_ordered = backward.is_deterministic;
    b.ordered.num_rows = INT_MAX;
    if (b.is_ordered) {
      ordered.emplace(call.tables, n, backward.rows_at_once, workspace);
      b.ordered = ordered->terms;
    }
    if (backward.grad_weights) rows = workspace.take<float>(n * call.max_dim);
  }
};

template <Precision kPrecision, bool kInShared>
void launch_grads_of(const CallMemory& memory, const BackwardCall& b, cudaStream_t stream) {
  Call call = memory.call;
  call.in_shared = kInShared;
  const int64_t bytes = kInShared ? memory.shared_bytes : 0;
  if (kInShared) {
    check_cuda(cudaFuncSetAttribute(make_grads<kPrecision, kInShared>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes)));
  }
  const int64_t blocks = kInShared ? memory.blocks(memory.num_windows()) : memory.general_blocks;
  TT_LAUNCH((make_grads<kPrecision, kInShared>), static_cast<unsigned>(blocks), kThreads, bytes, stream,
            call, b);
}

void launch_grads(const CallMemory& memory, const BackwardCall& b, cudaStream_t stream) {
  if (memory.has_tiled) {
    const auto launch = memory.precision == Precision::kTF32 ? launch_grads_of<Precision::kTF32, true>
                        : memory.precision == Precision::kBFloat16
                            ? launch_grads_of<Precision::kBFloat16, true>
                            : launch_grads_of<Precision::kFloat32, true>;
    launch(memory, b, stream);
  }
  if (memory.has_general) launch_grads_of<Precision::kFloat32, false>(memory, b, stream);
}

void launch_weight_grads(const BackwardMemory& memory, float* grad_weights, cudaStream_t stream) {
  const CallMemory& call = memory.call;
  launch_rows(call, memory.rows, call.max_dim, stream);
  TT_LAUNCH(make_weight_grads, call.blocks((call.call.plan.num_indices + kWarps - 1) / kWarps), kThreads,
            0, stream, call.call, memory.b.row_grads, memory.rows, call.max_dim, grad_weights);
}

}  // namespace

int64_t backward_workspace_bytes(const Lookup& lookup, const Backward& backward) {
  return BackwardMemory(lookup, backward, nullptr).workspace.bytes;
}

void launch_backward(const Lookup& lookup, const Backward& backward, void* workspace,
                     cudaStream_t stream) {
  const BackwardMemory memory(lookup, backward, workspace);
  const CallMemory& call = memory.call;
  const int64_t num_indices = lookup.plan.num_indices;
  call.prepare(stream);
  memory.bags.prepare(stream);
  TT_LAUNCH(clear_grads, dim3(call.blocks(64), call.call.num_tables * kMaxCores), kThreads, 0, stream,
            call.call, memory.b);
  check_cuda(cudaMemsetAsync(memory.b.grad_heads, 0, call.head_floats * sizeof(float), stream));
  if (backward.touched) {
    check_cuda(cudaMemsetAsync(backward.touched, 0, num_slices(lookup) * sizeof(int32_t), stream));
  }
  launch_row_gradients(call.call, call.device, memory.bags.bags, memory.b.row_grads, stream);
  if (memory.ordered) {
    BackwardCall turn = memory.b;
    for (int64_t first = 0; first < num_indices; first += turn.ordered.num_rows) {
      turn.ordered.first_row = static_cast<int>(first);
      launch_clear_terms(*memory.ordered, stream);
      launch_grads(call, turn, stream);
      launch_sum_terms(*memory.ordered, call, turn, stream);
    }
  } else {
    launch_grads(call, memory.b, stream);
  }
  launch_split_head_grads(call, memory.b.grad_heads, backward.touched, stream);
  if (backward.grad_weights) launch_weight_grads(memory, backward.grad_weights, stream);
  check_cuda(cudaGetLastError());
}

}  // namespace torchrec_tt::cuda
