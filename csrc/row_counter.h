// Counts how hot the rows are that a cache does not hold: Misra and Gries' "Finding repeated elements"
// (1982) in buckets of 8 cells, one of which a row's id chooses, as HotSketch's are (CAFE, SIGMOD 2024).
//
// A row that is in no cell of its bucket takes its lookups off the coldest one, and the cell itself when
// nothing is left of it. The many rows that are met once wear each other out; those that come back stay.
// Torch-free and for host and device; the cells of a bucket are counted one row after another.
#pragma once

#include "row_tags.h"

namespace torchrec_tt {

constexpr int64_t kCells = 8;  // of a bucket: one cache line of ids

// The first cell of the bucket of row `id`; other bits than those that choose its sets.
TT_HOST_DEVICE static inline int64_t first_cell(int64_t id, int64_t num_buckets) {
  return first_set(hash_row(-1 - id), num_buckets) * kCells;
}

// The first cell with `id`, or -1. No branches: which cell it is cannot be foreseen.
TT_HOST_DEVICE static inline int64_t find_cell(int64_t id, const int64_t* ids) {
  int64_t found = -1;
  for (int64_t cell = kCells - 1; cell >= 0; cell--) found = ids[cell] == id ? cell : found;
  return found;
}

// The coldest cell, the first of equal ones.
TT_HOST_DEVICE static inline int64_t coldest_cell(const float* heats) {
  float least[kCells / 2];
  for (int64_t c = 0; c < kCells / 2; c++) {
    least[c] = heats[c] < heats[c + kCells / 2] ? heats[c] : heats[c + kCells / 2];
  }
  const float a = least[0] < least[1] ? least[0] : least[1], b = least[2] < least[3] ? least[2] : least[3];
  const float coldest = a < b ? a : b;
  int64_t found = 0;
  for (int64_t cell = kCells - 1; cell >= 0; cell--) found = heats[cell] == coldest ? cell : found;
  return found;
}

// Counts `lookups` of row `id` in its bucket: ids [8] (-1: empty), heats [8].
TT_HOST_DEVICE static inline void count_lookups(int64_t id, float lookups, int64_t* ids, float* heats) {
  const int64_t own = find_cell(id, ids), coldest = coldest_cell(heats);
  const int64_t cell = own >= 0 ? own : coldest;
  const float heat = heats[cell];
  const bool is_taken = own < 0 && heat <= lookups;
  ids[cell] = is_taken ? id : ids[cell];
  heats[cell] = own >= 0 ? heat + lookups : is_taken ? lookups : heat - lookups;
}

// Notes that row `id` was looked up at time `now`; the row seen longest ago makes way for a new one.
TT_HOST_DEVICE static inline void note_lookup(int64_t id, float now, int64_t* ids, float* heats) {
  int64_t cell = find_cell(id, ids);
  if (cell < 0) cell = find_cell(-1, ids);
  if (cell < 0) cell = coldest_cell(heats);
  ids[cell] = id;
  heats[cell] = now;
}

}  // namespace torchrec_tt
