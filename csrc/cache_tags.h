// The tags of a call's row caches, taken from its tensors, on any device.
#pragma once

#include <limits>
#include <vector>

#include "checks.h"
#include "row_tags.h"
#include "stable.h"
#include "tt_shape.h"

namespace torchrec_tt {

// One entry per table, keys past those of all tables; cache_ids is empty where none has a cache.
// `check(ids, t)` throws for tags that cannot be table t's.
template <typename Check>
std::vector<CacheTags> take_tags(const std::vector<Tensor>& cache_ids,
                                 const std::vector<TTShape>& tables, const Check& check) {
  TT_CHECK(cache_ids.empty() || cache_ids.size() == tables.size(),
           "cache_ids must have one tensor per table, ", tables.size(), ", or none, got ",
           cache_ids.size());
  int64_t key_base = tables.back().key_base + tables.back().padded_rows();
  std::vector<CacheTags> caches;
  for (size_t t = 0; t < tables.size(); t++) {
    caches.push_back({nullptr, 0, key_base});
    if (cache_ids.empty() || cache_ids[t].numel() == 0) continue;
    check(cache_ids[t], t);
    caches[t].ids = static_cast<const int64_t*>(cache_ids[t].const_data_ptr());
    caches[t].num_slots = cache_ids[t].numel();
    TT_CHECK(key_base <= std::numeric_limits<int64_t>::max() - caches[t].num_slots,
             "tables must have less than 2^63 rows together, those of caches counted twice");
    key_base += caches[t].num_slots;
  }
  return caches;
}

}  // namespace torchrec_tt
