#include "row_gradients.cuh"

#include "cached_rows.cuh"

namespace torchrec_tt::cuda {
namespace {

constexpr int kLanesOfBag = 8;

// Eight threads a bag.
__global__ void __launch_bounds__(kThreads, kManyBlocks) place_bags(Bags bags, RowGradients g) {
  constexpr int kBags = kThreads / kLanesOfBag;
  const int first = static_cast<int>(blockIdx.x) * kBags + static_cast<int>(threadIdx.x) / kLanesOfBag;
  const int step = static_cast<int>(gridDim.x) * kBags;
  for (int bag = first; bag < bags.num_bags; bag += step) {
    const Feature feature = bags.features[bag / bags.batch_size];
    const int64_t begin = bags.offset(bag), end = bags.offset(bag + 1);
    const int64_t at = bag % bags.batch_size * bags.num_columns + feature.column;
    const float over = bags.is_mean ? 1.0f / static_cast<float>(end - begin) : 1.0f;
    for (int64_t i = begin + threadIdx.x % kLanesOfBag; i < end; i += kLanesOfBag) {
      g.grad_at[i] = bags.is_pooled ? at : i * feature.dim;
      if (g.scale) g.scale[i] = bags.weights ? bags.weights[i] * over : over;
      if (g.weight_scale) g.weight_scale[i] = over;
    }
  }
}

// The long row, if it is one, that holds sorted position `at`.
struct LongRow {
  int begin = 0, end = 0, dim = 0;

  __device__ LongRow(const Call& call, const RowGradients& g, int64_t at) {
    const int u = call.plan.inverse[call.plan.order[at]];
    const bool is_cached = u >= call.plan.counts[1];
    if (is_cached != g.of_cached || u >= call.plan.counts[0]) return;  // no rows: wrong offsets
    begin = call.plan.row_starts[u];
    end = call.plan.row_starts[u + 1];
    if (end - begin <= kPiece) return;
    dim = call.tables[table_of_row(call, u)].table.dim();
  }
};

// A warp a piece, a lane a column.
__global__ void __launch_bounds__(kThreads, kManyBlocks) sum_pieces(Call call, RowGradients g) {
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  for (int64_t piece = first; piece * kPiece < call.plan.num_indices;
       piece += int64_t{gridDim.x} * kWarps) {
    const LongRow row(call, g, piece * kPiece);
    const int begin = static_cast<int>(piece * kPiece), end = min(begin + kPiece, row.end);
    for (int column = threadIdx.x % 32; column < row.dim; column += 32) {
      float sum = 0;
      for (int p = begin; p < end; p++) sum += scaled_gradient(g, call.plan.order[p], column);
      g.pieces[piece * g.ld_pieces + column] = sum;
    }
  }
}

// A block a long row: each warp sums every eighth piece, then the warps' sums in order.
__global__ void __launch_bounds__(kThreads, kManyBlocks) sum_long_rows(Call call, RowGradients g) {
  TT_SHARED(float, sums, kThreads);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int64_t piece = blockIdx.x; piece * kPiece < call.plan.num_indices; piece += gridDim.x) {
    const int begin = static_cast<int>(piece * kPiece);
    const LongRow row(call, g, begin);
    if (begin - row.begin >= kPiece) continue;  // not its first
    const int64_t last = (row.end - 1) / kPiece;
    for (int first_column = 0; first_column < row.dim; first_column += 32) {
      const int column = first_column + lane;
      float sum = 0;
      if (column < row.dim) {
        for (int p = row.begin + warp; p < begin; p += kWarps) {
          sum += scaled_gradient(g, call.plan.order[p], column);
        }
        for (int64_t k = piece + warp; k <= last; k += kWarps) sum += g.pieces[k * g.ld_pieces + column];
      }
      sums[threadIdx.x] = sum;
      __syncthreads();
      if (warp == 0 && column < row.dim) {
        for (int w = 1; w < kWarps; w++) sum += sums[w * 32 + lane];
        g.pieces[piece * g.ld_pieces + column] = sum;
      }
      __syncthreads();  // before the next columns' sums
    }
  }
}

}  // namespace

void launch_row_gradients(const Call& call, const Device& device, const Bags& bags,
                          const RowGradients& g, cudaStream_t stream) {
  const int64_t n = call.plan.num_indices, pieces = (n + kPiece - 1) / kPiece;
  check_cuda(cudaMemsetAsync(g.grad_at, 0, n * sizeof(int64_t), stream));  // of other offsets' indices
  TT_LAUNCH(place_bags, blocks_for(device, bags.num_bags / (kThreads / kLanesOfBag) + 1), kThreads, 0,
            stream, bags, g);
  TT_LAUNCH(sum_pieces, blocks_for(device, (pieces + kWarps - 1) / kWarps), kThreads, 0, stream, call,
            g);
  TT_LAUNCH(sum_long_rows, blocks_for(device, pieces), kThreads, 0, stream, call, g);
}

}  // namespace torchrec_tt::cuda
