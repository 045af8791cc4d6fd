// The pooled lookup: a row per unique id, then the sum of every bag.
#include "bags.h"
#include "cached_rows.cuh"

namespace torchrec_tt::cuda {
namespace {

// Per window of prefixes: P = head @ mid once per prefix, then row = P @ last per unique row. Moves a
// mid slice per group of a window, a head slice per prefix, a last slice and a row per unique row.
// A block's memory is shared, or for tables that need more its own piece of global memory.
template <Precision kPrecision, bool kInShared>
__global__ void __launch_bounds__(kThreads, kFewBlocks)
    make_rows(Call call, float* __restrict__ rows, int64_t ld_rows) {
  TT_DYN_SMEM(float, shared);
  TT_SHARED(BatchState, state, 1);
  BatchState& s = *state;
  float* memory = kInShared ? shared : call.scratch + blockIdx.x * call.scratch_stride;
  const int num_prefixes = static_cast<int>(call.plan.counts[2]);
  const int64_t size = window_size(call, num_prefixes);
  const bool whole = takes_groups(call, num_prefixes);
  PrefixBatch batch;
  for (int64_t job = blockIdx.x; job * size < num_prefixes; job += gridDim.x) {
    const Prefixes all{0, num_prefixes}, window = window_of(all, job, size);
    const Prefixes range = whole ? whole_groups(call, window, all) : window;
    for (int q = range.begin; q < range.end; q += batch.count) {
      take_prefixes(call, q, range.end, batch, s, memory);
      const Table& t = s.table.table;
      const BlockLayout& at = s.table.at;
      if (t.is_tiled != call.in_shared) continue;
      make_products<kPrecision>(call, batch, s, memory);
      const int first_row = s.starts[0], end_row = s.ends[batch.count - 1];
      for (int u = first_row; u < end_row; u += at.rows) {
        const int count = min(at.rows, end_row - u);
        if (u > first_row) __syncthreads();  // others may still multiply
        load_lasts(call, s, u, count, memory);
        __syncthreads();
        const Product p{count, t.m_rows(), t.n_last, t.rank, at.ld_rank, at.ld_last,
                        0,     0,          {at.ld_last, 0}};
        float_product<true, false>(
            p,
            [&](int row) {
              return Factors{product_of(s, s.prefix_of_row[row], memory),
                             memory + at.lasts + row * at.last_stride, 1};
            },
            [&](int row, int m, int column, int stride, const auto& values) {
              float* out = rows + (u + row) * ld_rows + m * t.n_last;
              for_columns(values, column, stride, t.n_last, [&](int z, float v) { out[z] = v; });
            });
      }
    }
  }
}

constexpr int kColumns = 4;  // of a lane

// A warp per bag, 32 indices at a time, so that their rows are asked for together; cached rows are
// read where they lie. Moves a row and 4 bytes per index, 8 more of a cached one, and a weight.
__global__ void __launch_bounds__(kThreads, kManyBlocks)
    pool_bags(PlanView plan, Bags bags, const float* __restrict__ rows, int64_t ld_rows,
              float* __restrict__ output) {
  const int lane = threadIdx.x % 32;
  const int first = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  for (int bag = first; bag < bags.num_bags; bag += static_cast<int>(gridDim.x) * kWarps) {
    const Feature feature = bags.features[bag / bags.batch_size];
    const int64_t begin = bags.offset(bag), end = bags.offset(bag + 1);
    const float over = bags.is_mean ? 1.0f / static_cast<float>(end - begin) : 1.0f;
    float* out = output + bag % bags.batch_size * bags.num_columns + feature.column;
    for (int column = lane; column - lane < feature.dim; column += 32 * kColumns) {
      float sum[kColumns] = {};
      for (int64_t i = begin; i < end; i += 32) {
        const int count = static_cast<int>(min(end - i, int64_t{32}));
        const int64_t own = lane < count ? place_of_row(plan, plan.inverse[i + lane], ld_rows,
                                                        feature.cached_key, feature.num_slots,
                                                        feature.dim)
                                         : 0;
        const float weight = lane < count && bags.weights ? bags.weights[i + lane] : 1.0f;
        for (int k = 0; k < count; k++) {
          const int64_t place = __shfl_sync(~0u, own, k);
          const float scale = __shfl_sync(~0u, weight, k) * over;
          TT_UNROLL for (int j = 0; j < kColumns; j++) {
            if (column + 32 * j < feature.dim) {
              sum[j] += scale * row_element(rows, feature.cached_rows, feature.cached_storage, place,
                                            column + 32 * j);
            }
          }
        }
      }
      TT_UNROLL for (int j = 0; j < kColumns; j++) {
        if (column + 32 * j < feature.dim) out[column + 32 * j] = sum[j];
      }
    }
  }
}

// Without pooling: a warp per index; all tables have one dim.
__global__ void __launch_bounds__(kThreads, kManyBlocks)
    gather_rows(Call call, const float* __restrict__ weights, int dim,
                const float* __restrict__ rows, float* __restrict__ output) {
  const PlanView& plan = call.plan;
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  for (int64_t i = first; i < plan.num_indices; i += int64_t{gridDim.x} * kWarps) {
    const float weight = weights ? weights[i] : 1.0f;
    const int u = plan.inverse[i];
    const Table& t = call.tables[table_of_row(call, u)].table;
    const int64_t place = place_of_row(plan, u, dim, t.cached_key, t.num_slots, dim);
    for (int c = threadIdx.x % 32; c < dim; c += 32) {
      output[i * dim + c] = weight * row_element(rows, t.cached_rows, t.cached_storage, place, c);
    }
  }
}

template <Precision kPrecision, bool kInShared>
void launch_rows_of(const CallMemory& memory, float* rows, int64_t ld, cudaStream_t stream) {
  Call call = memory.call;
  call.in_shared = kInShared;
  const int64_t bytes = kInShared ? memory.shared_bytes : 0;
  if (kInShared) {
    check_cuda(cudaFuncSetAttribute(make_rows<kPrecision, kInShared>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes)));
  }
  const int64_t blocks = kInShared ? memory.blocks(memory.num_windows()) : memory.general_blocks;
  TT_LAUNCH((make_rows<kPrecision, kInShared>), static_cast<unsigned>(blocks), kThreads, bytes, stream,
            call, rows, ld);
}

struct ForwardMemory {
  Workspace workspace;
  CallMemory call;
  BagsMemory bags;
  float* rows;

  ForwardMemory(const Lookup& lookup, void* base)
      : workspace{static_cast<char*>(base)}, call(lookup, false, workspace), bags(lookup, workspace),
        rows(workspace.take<float>(lookup.plan.num_indices * call.max_dim)) {}
};

}  // namespace

void launch_rows(const CallMemory& memory, float* rows, int64_t ld, cudaStream_t stream) {
  if (memory.has_tiled) {
    const auto launch = memory.precision == Precision::kTF32 ? launch_rows_of<Precision::kTF32, true>
                        : memory.precision == Precision::kBFloat16
                            ? launch_rows_of<Precision::kBFloat16, true>
                            : launch_rows_of<Precision::kFloat32, true>;
    launch(memory, rows, ld, stream);
  }
  if (memory.has_general) launch_rows_of<Precision::kFloat32, false>(memory, rows, ld, stream);
}

int64_t forward_workspace_bytes(const Lookup& lookup) {
  return ForwardMemory(lookup, nullptr).workspace.bytes;
}

void launch_forward(const Lookup& lookup, float* output, void* workspace, cudaStream_t stream) {
  const ForwardMemory memory(lookup, workspace);
  const Bags& bags = memory.bags.bags;
  memory.call.prepare(stream);
  memory.bags.prepare(stream);
  launch_rows(memory.call, memory.rows, memory.call.max_dim, stream);
  if (bags.is_pooled) {
    TT_LAUNCH(pool_bags, memory.call.blocks((bags.num_bags + kWarps - 1) / kWarps), kThreads, 0, stream,
              lookup.plan, bags, memory.rows, memory.call.max_dim, output);
  } else {
    TT_LAUNCH(gather_rows, memory.call.blocks((lookup.plan.num_indices + kWarps - 1) / kWarps), kThreads,
              0, stream, memory.call.call, lookup.weights, memory.call.max_dim, memory.rows, output);
  }
  check_cuda(cudaGetLastError());
}

}  // namespace torchrec_tt::cuda
