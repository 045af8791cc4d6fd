#include "ordered_sums.h"

#include <algorithm>
#include <climits>

#include "sort.h"

namespace torchrec_tt::cuda {
namespace {

constexpr int64_t kTermBytes = 256 << 20;
constexpr int64_t kLeastRows = 1024;

int64_t num_places(const Table& t, int64_t num_indices) {
  return t.num_cores == 4 ? std::min(t.m_head, num_indices) : t.m_head;
}

__global__ void __launch_bounds__(kThreads, kManyBlocks)
    clear_terms(int32_t* places, uint32_t* targets, uint32_t none, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    places[i] = static_cast<int32_t>(i);
    targets[i] = none;
  }
}

__device__ int64_t first_at_least(const uint32_t* sorted, int64_t count, uint32_t target) {
  int64_t low = 0, high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (sorted[middle] < target) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Adds the terms [begin, end) of one target, in groups of threads that take every so many-th.
__device__ void sum_target(const OrderedSums& o, int64_t begin, int64_t end, int size, float* grad,
                           float* sums) {
  for (int first = 0; first < size; first += kThreads) {
    const int width = min(size - first, kThreads), groups = kThreads / width;
    const int group = threadIdx.x / width, element = threadIdx.x % width;
    float sum = 0;
    if (group < groups) {
      for (int64_t i = begin + group; i < end; i += groups) {
        sum += o.terms.terms[o.sorted_places[i] * o.terms.ld + first + element];
      }
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (group == 0) {
      for (int g = 1; g < groups; g++) sum += sums[g * width + element];
      grad[first + element] += sum;
    }
    __syncthreads();  // before the next elements' sums
  }
}

// One block a target: a last slice or a head.
__global__ void __launch_bounds__(kThreads, kManyBlocks) sum_terms(Call call, BackwardCall b, OrderedSums o) {
  TT_SHARED(float, sums, kThreads);
  const int64_t count = 2 * int64_t{o.terms.num_rows};
  for (int64_t target = blockIdx.x; target < o.num_targets; target += gridDim.x) {
    const int64_t begin = first_at_least(o.sorted_targets, count, static_cast<uint32_t>(target));
    if (begin == count || o.sorted_targets[begin] != target) continue;
    const int64_t end = first_at_least(o.sorted_targets, count, static_cast<uint32_t>(target) + 1);
    int low = 0, high = call.num_tables - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (call.tables[middle].table.first_target <= target) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const Table& t = call.tables[low].table;
    const int64_t own = target - t.first_target;
    const bool is_last = own < t.m_last;
    const int core = is_last ? t.last_core() : 0;
    const int64_t slice = is_last ? own : own - t.m_last;
    const int size = is_last ? t.last_size() : t.head_size();
    const bool is_head_of_four = !is_last && t.num_cores == 4;
    float* grads = is_head_of_four ? b.grad_heads + t.heads_at : t.grads[core];
    sum_target(o, begin, end, size, grads + slice * size, sums);
    if (threadIdx.x == 0 && b.touched && !is_head_of_four) b.touched[t.first_slice[core] + slice] = 1;
  }
}

}  // namespace

OrderedSums::OrderedSums(std::vector<CallTable>& tables, int64_t num_indices, int64_t rows_at_once,
                         Workspace& workspace) {
  for (CallTable& of : tables) {
    Table& t = of.table;
    t.first_target = num_targets;
    num_targets += t.m_last + num_places(t, num_indices);
    terms.ld = std::max<int64_t>(terms.ld, std::max(t.last_size(), t.head_size()));
  }
  TT_CHECK(num_targets < INT_MAX, "tables must have less than 2^31 slices together on CUDA, got ",
           num_targets);
  if (rows_at_once == 0) {
    rows_at_once = std::max(kTermBytes / (2 * terms.ld * int64_t{sizeof(float)}), kLeastRows);
  }
  const int64_t most = std::max<int64_t>(num_indices, 1);
  terms.num_rows = static_cast<int>(std::clamp<int64_t>(rows_at_once, 1, most));
  const int64_t count = 2 * int64_t{terms.num_rows};
  terms.terms = workspace.take<float>(count * terms.ld);
  terms.targets = workspace.take<uint32_t>(count);
  sorted_targets = workspace.take<uint32_t>(count);
  places = workspace.take<int32_t>(count);
  sorted_places = workspace.take<int32_t>(count);
  sort_pairs(nullptr, temporary_bytes, terms.targets, sorted_targets, places, sorted_places, count,
             bits_of(num_targets), nullptr);
  temporary = workspace.take<char>(static_cast<int64_t>(temporary_bytes));
}

void launch_clear_terms(const OrderedSums& sums, cudaStream_t stream) {
  const int64_t count = 2 * int64_t{sums.terms.num_rows};
  const int64_t blocks = std::min<int64_t>((count + kThreads - 1) / kThreads, 1024);
  TT_LAUNCH(clear_terms, static_cast<unsigned>(blocks), kThreads, 0, stream, sums.places,
            sums.terms.targets, static_cast<uint32_t>(sums.num_targets), count);
}

void launch_sum_terms(const OrderedSums& sums, const CallMemory& memory, const BackwardCall& b,
                      cudaStream_t stream) {
  const int64_t count = 2 * int64_t{sums.terms.num_rows};
  size_t bytes = sums.temporary_bytes;
  sort_pairs(sums.temporary, bytes, sums.terms.targets, sums.sorted_targets, sums.places,
             sums.sorted_places, count, bits_of(sums.num_targets), stream);
  TT_LAUNCH(sum_terms, memory.blocks(sums.num_targets), kThreads, 0, stream, memory.call, b, sums);
}

}  // namespace torchrec_tt::cuda
