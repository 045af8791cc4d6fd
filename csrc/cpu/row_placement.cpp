// Which rows a cache takes in and which leave: the counter's hottest first, each into one of its two sets.
#include <algorithm>
#include <bit>
#include <limits>
#include <tuple>
#include <vector>

#include "../row_counter.h"
#include "../stable.h"
#include "../checks.h"

namespace torchrec_tt {
namespace {

struct Slots {
  int64_t* ids;
  float* heats;
  int64_t num_sets;

  // A row that is not hotter takes no slot.
  double least_heat(double ratio, double margin) const {
    if (std::any_of(ids, ids + num_sets * kWays, [](int64_t id) { return id < 0; })) {
      return -std::numeric_limits<double>::infinity();
    }
    return ratio * *std::min_element(heats, heats + num_sets * kWays) + margin;
  }

  // A free slot of the emptier of the row's two sets, or else the coldest slot of the two.
  int64_t best_for(int64_t id) const {
    const uint64_t hash = hash_row(id);
    const int64_t sets[] = {first_set(hash, num_sets), second_set(hash, num_sets)};
    int64_t num_free[2] = {}, free_slot[2] = {}, coldest = -1;
    for (int k = 0; k < 2; k++) {
      for (int64_t slot = (sets[k] + 1) * kWays - 1; slot >= sets[k] * kWays; slot--) {
        if (ids[slot] < 0) {
          num_free[k]++;
          free_slot[k] = slot;
        } else if (coldest < 0 || heats[slot] <= heats[coldest]) {
          coldest = slot;
        }
      }
    }
    if (num_free[0] + num_free[1] == 0) return coldest;
    return num_free[1] > num_free[0] ? free_slot[1] : free_slot[0];
  }
};

// Bits that ascend as heats descend.
uint32_t coldness(float heat) {
  const uint32_t bits = std::bit_cast<uint32_t>(heat);
  return bits >> 31 ? bits : ~bits & 0x7fffffff;
}

struct Candidate {
  uint32_t coldness, cell;
};

// The counter's cells that are hotter than `least`, the hottest first; equal ones as they stand there.
// Heats are mostly small numbers, many alike: a radix sort takes a quarter of std::sort's time.
std::vector<Candidate> by_heat(const int64_t* ids, const float* heats, int64_t num_cells, double least) {
  constexpr int kBits = 11;
  std::vector<Candidate> from, to;
  for (int64_t cell = 0; cell < num_cells; cell++) {
    if (ids[cell] >= 0 && heats[cell] > least) {
      from.push_back({coldness(heats[cell]), static_cast<uint32_t>(cell)});
    }
  }
  to.resize(from.size());
  for (int shift = 0; shift < 32; shift += kBits) {
    const auto digit = [&](const Candidate& c) { return c.coldness >> shift & ((1 << kBits) - 1); };
    size_t places[(1 << kBits) + 1] = {};
    for (const Candidate& c : from) places[digit(c) + 1]++;
    for (int d = 0; d < 1 << kBits; d++) places[d + 1] += places[d];
    for (const Candidate& c : from) to[places[digit(c)]++] = c;
    from.swap(to);
  }
  return from;
}

template <typename T>
T* data_of(const Tensor& tensor, ScalarType type, int64_t multiple, const char* name) {
  TT_CHECK(tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == type &&
               tensor.numel() % multiple == 0,
           name, " must be contiguous, on the CPU, ", type, " and of a multiple of ", multiple,
           " elements, got ", tensor.numel());
  return static_cast<T*>(tensor.mutable_data_ptr());
}

template <typename T>
Tensor as_tensor(const std::vector<T>& values, ScalarType type) {
  Tensor tensor = torch::stable::empty({static_cast<int64_t>(values.size())}, type);
  std::copy(values.begin(), values.end(), static_cast<T*>(tensor.mutable_data_ptr()));
  return tensor;
}

std::tuple<Tensor, Tensor, Tensor> place_rows(const Tensor& ids_tensor, const Tensor& heats_tensor,
                                              const Tensor& counter_ids_tensor,
                                              const Tensor& counter_heats_tensor, double ratio,
                                              double margin) {
  const Slots slots{data_of<int64_t>(ids_tensor, ScalarType::Long, kWays, "ids"),
                    data_of<float>(heats_tensor, ScalarType::Float, kWays, "heats"),
                    ids_tensor.numel() / kWays};
  auto* counter_ids = data_of<int64_t>(counter_ids_tensor, ScalarType::Long, kCells, "counter_ids");
  auto* counter_heats = data_of<float>(counter_heats_tensor, ScalarType::Float, kCells, "counter_heats");
  TT_CHECK(heats_tensor.numel() == ids_tensor.numel() &&
               counter_heats_tensor.numel() == counter_ids_tensor.numel(),
           "heats and counter_heats must have the sizes of ids and counter_ids, ", ids_tensor.numel(),
           " and ", counter_ids_tensor.numel(), ", got ", heats_tensor.numel(), " and ",
           counter_heats_tensor.numel());
  std::vector<int64_t> taken, evicted_ids;
  std::vector<float> evicted_heats;
  const auto result = [&] {
    return std::tuple(as_tensor(taken, ScalarType::Long), as_tensor(evicted_ids, ScalarType::Long),
                      as_tensor(evicted_heats, ScalarType::Float));
  };
  if (slots.num_sets == 0) return result();
  const double least = slots.least_heat(ratio, margin);
  for (const Candidate& candidate :
       by_heat(counter_ids, counter_heats, counter_ids_tensor.numel(), least)) {
    const int64_t cell = candidate.cell, id = counter_ids[cell];
    const float heat = counter_heats[cell];
    if (find_slot(id, slots.ids, slots.num_sets) < 0) {
      const int64_t slot = slots.best_for(id);
      const bool is_free = slots.ids[slot] < 0;
      if (!is_free && heat <= ratio * slots.heats[slot] + margin) continue;
      taken.push_back(slot);
      evicted_ids.push_back(slots.ids[slot]);
      evicted_heats.push_back(is_free ? 0 : slots.heats[slot]);
      slots.ids[slot] = id;
      slots.heats[slot] = heat;
    }
    counter_ids[cell] = -1;
    counter_heats[cell] = 0;
  }
  return result();
}

}  // namespace
}  // namespace torchrec_tt

STABLE_TORCH_LIBRARY_IMPL(torchrec_tt, CPU, m) {
  m.impl("place_rows", TORCH_BOX(&torchrec_tt::place_rows));
}
