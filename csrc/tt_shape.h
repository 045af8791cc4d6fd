// The tables of one call, decoded from the flat integers that the operators take.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "checks.h"

namespace torchrec_tt {

constexpr int kMaxCores = 4;

// A TT table of 2 to 4 cores seen as head, mid and last: row id = (head * m_mid + mid) * m_last + last.
//   2 cores: head = i0,            no mid (m_mid = 1), last = i1
//   3 cores: head = i0,            mid = i1,           last = i2
//   4 cores: head = i0 * m_1 + i1, mid = i2,           last = i3
// A prefix is (head, mid); its product P is [m_rows, rank] and a row is P @ last slice [rank, n_last].
struct TTShape {
  int num_cores = 0;
  int64_t num_rows = 0;    // valid ids are [0, num_rows)
  int64_t row_offset = 0;  // of this shard's first row in the table
  int64_t m[kMaxCores] = {};      // row factors
  int64_t n[kMaxCores] = {};      // column factors
  int64_t r[kMaxCores + 1] = {};  // ranks, r[0] = r[num_cores] = 1
  int64_t key_base = 0;           // this table's keys are [key_base, key_base + padded rows)

  int64_t m_head() const { return num_cores == 4 ? m[0] * m[1] : m[0]; }
  int64_t m_mid() const { return num_cores == 2 ? 1 : m[num_cores - 2]; }
  int64_t m_last() const { return m[num_cores - 1]; }
  int64_t n_last() const { return n[num_cores - 1]; }
  int64_t rank() const { return r[num_cores - 1]; }
  int64_t padded_rows() const { return m_head() * m_mid() * m_last(); }
  int64_t embedding_dim() const {
    int64_t product = 1;
    for (int k = 0; k < num_cores; k++) product *= n[k];
    return product;
  }
  int64_t slice_size(int k) const { return r[k] * n[k] * r[k + 1]; }
};

// Decodes, per table, [d, num_rows, row_offset, d row factors, d column factors, d - 1 ranks].
inline std::vector<TTShape> decode_tables(const std::vector<int64_t>& flat) {
  std::vector<TTShape> tables;
  int64_t key_base = 0;
  size_t at = 0;
  while (at < flat.size()) {
    TTShape table;
    const int64_t d = flat[at];
    TT_CHECK(d >= 2 && d <= kMaxCores, "tables must have 2 to 4 cores, got ", d);
    TT_CHECK(at + 2 + 3 * d <= flat.size(), "tables must hold ", 2 + 3 * d, " integers for ", d,
             " cores, got ", flat.size() - at);
    table.num_cores = static_cast<int>(d);
    table.num_rows = flat[at + 1];
    table.row_offset = flat[at + 2];
    at += 3;
    std::copy_n(&flat[at], d, table.m);
    std::copy_n(&flat[at + d], d, table.n);
    table.r[0] = table.r[d] = 1;
    std::copy_n(&flat[at + 2 * d], d - 1, table.r + 1);
    at += 3 * d - 1;
    __int128 padded = 1;
    for (int k = 0; k < d; k++) {
      TT_CHECK(table.m[k] > 0 && table.n[k] > 0 && table.r[k] > 0,
               "tables must have positive factors and ranks, got ", table.m[k], ", ", table.n[k],
               ", ", table.r[k], " in core ", k);
      padded *= table.m[k];
      TT_CHECK(padded + key_base <= INT64_MAX, "tables must have less than 2^63 rows together");
    }
    TT_CHECK(table.num_rows >= 0 && table.row_offset >= 0 &&
                 table.num_rows + table.row_offset <= table.padded_rows(),
             "tables must have row_offset + num_rows at most the product of the row factors, got ",
             table.row_offset, " + ", table.num_rows, " > ", table.padded_rows());
    table.key_base = key_base;
    key_base += table.padded_rows();
    tables.push_back(table);
  }
  return tables;
}

template <typename Offset>
void check_offsets(const Offset* offsets, int64_t num_offsets, int64_t num_indices) {
  TT_CHECK(offsets[0] == 0, "offsets must start at 0, got ", offsets[0]);
  Offset signs = 0;  // negative if an offset or a difference is, without a branch for each
  for (int64_t i = 1; i < num_offsets; i++) {
    signs |= offsets[i] | static_cast<Offset>(static_cast<uint64_t>(offsets[i]) - offsets[i - 1]);
  }
  for (int64_t i = 1; signs < 0 && i < num_offsets; i++) {
    TT_CHECK(offsets[i - 1] <= offsets[i], "offsets must not decrease, got ", offsets[i - 1],
             " then ", offsets[i], " at position ", i);
  }
  TT_CHECK(offsets[num_offsets - 1] == num_indices, "offsets must end at the number of indices, ",
           num_indices, ", got ", offsets[num_offsets - 1]);
}

// Where each feature of a call reads and writes; bags are numbered feature * batch_size + b.
struct Features {
  std::vector<int64_t> table;   // [F] the table a feature reads
  std::vector<int64_t> column;  // [F] its first column of the output
  int64_t num_columns = 0;
  int64_t batch_size = 0;

  Features(const std::vector<int64_t>& feature_tables, const std::vector<TTShape>& tables,
           int64_t num_offsets)
      : table(feature_tables) {
    const int64_t num_features = static_cast<int64_t>(table.size());
    for (int64_t t : table) {
      TT_CHECK(t >= 0 && t < static_cast<int64_t>(tables.size()),
               "feature_tables must be in [0, ", tables.size(), "), got ", t);
      column.push_back(num_columns);
      num_columns += tables[t].embedding_dim();
    }
    TT_CHECK(num_features > 0, "feature_tables must not be empty");
    TT_CHECK(num_offsets >= 1 && (num_offsets - 1) % num_features == 0,
             "offsets must have features * batch + 1 entries, got ", num_offsets, " for ",
             num_features, " features");
    batch_size = (num_offsets - 1) / num_features;
  }
};

}  // namespace torchrec_tt
