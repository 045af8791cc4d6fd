// The heads of 4-core tables: those that occur, found once, their products, and their gradients' way
// back to cores 0 and 1. A head [n0 * n1, r_head] is slice i0 [n0, r1] @ slice i1 [r1, n1 * r_head].
#include "prefix_batch.cuh"

namespace torchrec_tt::cuda {
namespace {

// One thread a prefix. Whoever meets a head first gives it a place; which place shows nowhere.
__global__ void __launch_bounds__(kThreads, kManyBlocks) find_heads(Call call, HeadMap map) {
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (int64_t q = first; q < call.plan.counts[2]; q += int64_t{gridDim.x} * kThreads) {
    const int64_t key = first_key(call.plan, static_cast<int>(q));
    const int table = table_of(call, key);
    const Table& t = call.tables[table].table;
    if (t.num_cores != 4) continue;
    const int64_t digit = (key - t.key_base) / t.m_last % t.m_head;
    int* slot = map.slots + t.first_head_digit + digit;
    if (atomicCAS(slot, kNoHead, kTakenHead) != kNoHead) continue;
    const int place = atomicAdd(map.counts + table, 1);
    map.digits[t.first_head_place + place] = digit;
    atomicExch(slot, place);
  }
}

// One block a head, one thread an element.
__global__ void __launch_bounds__(kThreads, kManyBlocks) multiply_heads(Call call, HeadMap map) {
  const int table = blockIdx.y;
  const Table& t = call.tables[table].table;
  if (t.num_cores != 4) return;
  const int width = t.n1 * t.r_head;
  for (int place = blockIdx.x; place < map.counts[table]; place += gridDim.x) {
    const int64_t digit = map.digits[t.first_head_place + place];
    const int64_t at0 = digit / t.m1 * t.n0 * t.r1, at1 = digit % t.m1 * t.r1 * width;
    float* head = call.heads + t.heads_at + static_cast<int64_t>(place) * t.head_size();
    for (int e = threadIdx.x; e < t.head_size(); e += kThreads) {
      const int x = e / width, c = e % width;
      float sum = 0;
      for (int a = 0; a < t.r1; a++) {
        sum += load_element(t.cores[0], t.storage, at0 + x * t.r1 + a) *
               load_element(t.cores[1], t.storage, at1 + a * width + c);
      }
      head[e] = sum;
    }
  }
}

// One block a slice of core 0 or 1, one thread an element, the slice's heads in ascending order.
__global__ void __launch_bounds__(kThreads, kManyBlocks) split_head_grads(Call call, const float* grad_heads,
                                                             int32_t* touched) {
  const Table& t = call.tables[blockIdx.y].table;
  if (t.num_cores != 4) return;
  const int width = t.n1 * t.r_head;
  const int64_t m0 = t.m[0];
  for (int64_t slice = blockIdx.x; slice < m0 + t.m1; slice += gridDim.x) {
    const int core = slice < m0 ? 0 : 1;
    const int64_t own = core == 0 ? slice : slice - m0;
    const int64_t count = core == 0 ? t.m1 : m0;
    const int size = core == 0 ? t.n0 * t.r1 : t.r1 * width;
    bool is_touched = false;
    for (int e = threadIdx.x; e < size; e += kThreads) {
      float sum = 0;
      for (int64_t other = 0; other < count; other++) {
        const int64_t i0 = core == 0 ? own : other, i1 = core == 0 ? other : own;
        const int place = call.head_slots[t.first_head_digit + i0 * t.m1 + i1];
        if (place == kNoHead) continue;
        is_touched = true;
        const float* grad = grad_heads + t.heads_at + static_cast<int64_t>(place) * t.head_size();
        if (core == 0) {  // grad0[x, a] += sum_c grad[x, c] slice1[a, c]
          const int x = e / t.r1, a = e % t.r1;
          for (int c = 0; c < width; c++) {
            sum += grad[x * width + c] * load_element(t.cores[1], t.storage,
                                                      (i1 * t.r1 + a) * width + c);
          }
        } else {  // grad1[a, c] += sum_x slice0[x, a] grad[x, c]
          const int a = e / width, c = e % width;
          for (int x = 0; x < t.n0; x++) {
            sum += grad[x * width + c] *
                   load_element(t.cores[0], t.storage, (i0 * t.n0 + x) * t.r1 + a);
          }
        }
      }
      t.grads[core][own * size + e] = sum;
    }
    if (threadIdx.x == 0 && is_touched && touched) touched[t.first_slice[core] + own] = 1;
  }
}

}  // namespace

void launch_heads(const CallMemory& memory, cudaStream_t stream) {
  if (!memory.has_heads) return;
  const int num_tables = memory.call.num_tables;
  const HeadMap& map = memory.heads;
  check_cuda(cudaMemsetAsync(map.slots, 0xff, map.num_slots * sizeof(int32_t), stream));
  check_cuda(cudaMemsetAsync(map.counts, 0, num_tables * sizeof(int32_t), stream));
  const int64_t num_indices = memory.call.plan.num_indices;
  TT_LAUNCH(find_heads, memory.blocks((num_indices + kThreads - 1) / kThreads), kThreads, 0, stream,
            memory.call, memory.heads);
  TT_LAUNCH(multiply_heads, dim3(memory.blocks(memory.most_heads), num_tables), kThreads, 0, stream,
            memory.call, memory.heads);
}

void launch_split_head_grads(const CallMemory& memory, const float* grad_heads, int32_t* touched,
                             cudaStream_t stream) {
  if (!memory.has_heads) return;
  TT_LAUNCH(split_head_grads, dim3(memory.blocks(memory.most_heads), memory.call.num_tables), kThreads,
            0, stream, memory.call, grad_heads, touched);
}

}  // namespace torchrec_tt::cuda
