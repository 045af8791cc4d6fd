// The record of a batch's first fault, as a kernel writes it.
#pragma once

#include "plan.h"

namespace torchrec_tt::cuda {

// Writes `what` into a record that holds nothing, else leaves it. Kernels of two streams may meet
// here: who claims the record by its first word is alone until the fault stands there.
__device__ inline void record(const FaultRecord& what, FaultRecord* into) {
  using Word = unsigned long long;
  static_assert(sizeof(Word) == sizeof(into->fault));
  constexpr auto kNone = static_cast<Word>(Fault::kNone);
  constexpr auto kWriting = static_cast<Word>(Fault::kWriting);
  if (!into) return;
  Word* state = reinterpret_cast<Word*>(&into->fault);
  if (atomicCAS(state, kNone, kWriting) != kNone) return;
  into->at = what.at;
  into->table = what.table;
  into->feature = what.feature;
  into->value = what.value;
  into->limit = what.limit;
  __threadfence_system();
  atomicExch(state, static_cast<Word>(what.fault));
}

}  // namespace torchrec_tt::cuda
