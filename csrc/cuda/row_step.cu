// The optimizers' steps on cached rows: a row takes the sum of its indices' gradients and steps where it
// lies; rows without an index stay, their moments too. A warp owns its row: no atomic sums.
#include "bags.h"
#include "cached_rows.cuh"
#include "row_gradients.cuh"
#include "step.cuh"

namespace torchrec_tt::cuda {
namespace {

// Adds the mean square of row u, in a slot, to its sum; returns lr / (sqrt(sum) + eps) to every lane.
__device__ float rowwise_scale(const PlanView& plan, const RowGradients& g, const Settings& o,
                               const CoreStep& c, int u, int64_t slot, int dim) {
  float squares = 0;
  for (int column = threadIdx.x % 32; column < dim; column += 32) {
    const float weight = o.is_coupled ? load_element(c.weight, c.storage, slot * dim + column) : 0.0f;
    const float grad = decayed(o, row_gradient(g, plan, u, column), weight);
    squares += grad * grad;
  }
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(~0u, squares, step);
  const float sum = c.moment1[slot] + squares / static_cast<float>(dim);
  __syncwarp();  // all lanes have read the old sum
  if (threadIdx.x % 32 == 0) c.moment1[slot] = sum;
  return o.learning_rate / (sqrtf(sum) + o.eps);
}

// A warp per cached row of the batch, a lane a column. Moves per row its gradients, and the row and its
// moments to and fro.
__global__ void __launch_bounds__(kThreads, kManyBlocks)
    step_rows(Call call, RowGradients g,
              const SteppedCore* __restrict__ tables,   // [T] no weight: frozen
              const int64_t* const* __restrict__ tags,  // [T]
              Settings o) {
  const PlanView& plan = call.plan;
  const int64_t first = plan.counts[1] + (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  for (int64_t u = first; u < plan.counts[0]; u += int64_t{gridDim.x} * kWarps) {
    const int row = static_cast<int>(u), table = table_of_slot(call, plan.row_keys[u]);
    const Table& t = call.tables[table].table;
    const SteppedCore& s = tables[table];
    const CoreStep& c = s.core;
    const int64_t slot = plan.row_keys[u] - t.cached_key;
    if (!c.weight || slot >= c.num_slices) continue;
    const int dim = t.dim();
    const float scale = o.optimizer == Optimizer::kRowwiseAdagrad
                            ? rowwise_scale(plan, g, o, c, row, slot, dim)
                            : o.learning_rate;
    const int64_t first_element = tags[table][slot] * dim;  // rounded alike in whatever slot
    for (int column = threadIdx.x % 32; column < dim; column += 32) {
      const int64_t at = slot * dim + column;
      const float before = load_element(c.weight, c.storage, at);
      const float grad = decayed(o, row_gradient(g, plan, row, column), before);
      const float after = stepped(o, s, at, before, grad, scale);
      store_element(c.weight, c.storage, at, after, c.is_stochastic, s.rounding_key,
                    first_element + column);
    }
  }
}

struct StepMemory {
  Workspace workspace;
  std::vector<CallTable> tables;
  Call call{};
  BagsMemory bags;
  RowGradients g{};
  SteppedCore* stepped;
  const int64_t** tags;

  StepMemory(const Lookup& lookup, void* base)
      : workspace{static_cast<char*>(base)}, bags(lookup, workspace) {
    const int64_t n = lookup.plan.num_indices;
    int max_dim = 0;
    for (const Table& table : lookup.tables) {
      tables.push_back({table, {}});
      max_dim = std::max(max_dim, table.dim());
    }
    call.tables = workspace.take<CallTable>(static_cast<int64_t>(tables.size()));
    call.num_tables = static_cast<int>(tables.size());
    call.plan = lookup.plan;
    g.grad_at = workspace.take<int64_t>(n);
    if (lookup.weights || lookup.pooling == Pooling::kMean) g.scale = workspace.take<float>(n);
    g.ld_pieces = max_dim;
    g.pieces = workspace.take<float>((n / kPiece + 1) * g.ld_pieces);
    g.of_cached = true;
    stepped = workspace.take<SteppedCore>(call.num_tables);
    tags = workspace.take<const int64_t*>(call.num_tables);
  }
};

template <typename T>
void upload(const std::vector<T>& from, const void* to, cudaStream_t stream) {
  launch_upload(from.data(), static_cast<int64_t>(from.size() * sizeof(T)), const_cast<void*>(to),
                stream);
}

}  // namespace

int64_t row_step_workspace_bytes(const Lookup& lookup) {
  return StepMemory(lookup, nullptr).workspace.bytes;
}

void launch_row_step(const Lookup& lookup, const float* grad_output,
                     const std::vector<RowStep>& tables, const StepSettings& settings,
                     void* workspace, cudaStream_t stream) {
  StepMemory memory(lookup, workspace);
  memory.g.grad_output = grad_output;
  std::vector<SteppedCore> stepped;
  std::vector<const int64_t*> tags;
  for (const RowStep& table : tables) {
    stepped.push_back({table.rows, 0, 0, 1, 0});
    tags.push_back(table.ids);
  }
  upload(memory.tables, memory.call.tables, stream);
  upload(stepped, memory.stepped, stream);
  upload(tags, memory.tags, stream);
  launch_count_steps(memory.stepped, memory.call.num_tables, settings, stream);
  memory.bags.prepare(stream);
  launch_row_gradients(memory.call, settings.device, memory.bags.bags, memory.g, stream);
  const int64_t warps = lookup.plan.num_indices / kWarps + 1;
  TT_LAUNCH(step_rows, blocks_for(settings.device, warps), kThreads, 0, stream, memory.call, memory.g,
            memory.stepped, memory.tags, narrowed(settings));
  check_cuda(cudaGetLastError());
}

}  // namespace torchrec_tt::cuda
