#include "call_memory.h"

#include <algorithm>
#include <climits>

namespace torchrec_tt::cuda {
namespace {

constexpr int64_t kMaxSliceSize = 1 << 24;       // elements of a core's slice
constexpr int64_t kMaxBlockFloats = 1 << 28;     // of a block's memory
constexpr size_t kMaxTables = 65535 / kMaxCores;  // of a grid's second dimension
constexpr int64_t kMaxHeadDigits = 1 << 30;      // of 4-core tables
constexpr int64_t kStaticSharedBytes = 4 << 10;  // more than any kernel's own

std::string shape_of(const Table& t) {
  std::ostringstream text;
  text << "row factors";
  for (int k = 0; k < t.num_cores; k++) text << " " << t.m[k];
  text << ", a head of " << t.n_head << " x " << t.r_head << ", a mid slice of " << t.n_mid
       << " columns, rank " << t.rank << ", " << t.n_last << " last columns";
  return text.str();
}

}  // namespace

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

Device current_device() {
  int number = 0;
  Device device;
  check_cuda(cudaGetDevice(&number));
  check_cuda(cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                    number));
  check_cuda(cudaDeviceGetAttribute(&device.num_multiprocessors, cudaDevAttrMultiProcessorCount,
                                    number));
  return device;
}

Table make_table(const TTShape& shape, const void* const* cores, Storage storage) {
  const int d = shape.num_cores;
  Table t{};
  for (int k = 0; k < d; k++) {
    TT_CHECK(shape.slice_size(k) <= kMaxSliceSize && shape.embedding_dim() <= kMaxSliceSize &&
                 shape.n[0] * shape.n[1] * shape.r[2] <= kMaxSliceSize,
             "tables must have slices, heads and rows of at most ", kMaxSliceSize,
             " elements on CUDA, got core ", k, " with ", shape.r[k], " x ", shape.n[k], " x ",
             shape.r[k + 1], " and embedding_dim ", shape.embedding_dim());
    t.cores[k] = cores[k];
    t.m[k] = shape.m[k];
  }
  const auto number = [](int64_t value) { return static_cast<int>(value); };
  t.num_cores = d;
  t.has_mid = d > 2;
  t.storage = storage;
  t.n_head = number(d == 4 ? shape.n[0] * shape.n[1] : shape.n[0]);
  t.n_mid = number(d > 2 ? shape.n[d - 2] : 1);
  t.n_last = number(shape.n_last());
  t.rank = number(shape.rank());
  t.r_head = number(d > 2 ? shape.r[d - 2] : shape.rank());
  t.m_head = shape.m_head();
  t.m_mid = shape.m_mid();
  t.m_last = shape.m_last();
  t.key_base = shape.key_base;
  if (d == 4) {
    t.n0 = number(shape.n[0]);
    t.r1 = number(shape.r[1]);
    t.n1 = number(shape.n[1]);
    t.m1 = shape.m[1];
  }
  return t;
}

int64_t num_slices(const Lookup& lookup) {
  int64_t count = 0;
  for (const Table& t : lookup.tables) {
    for (int k = 0; k < t.num_cores; k++) count += t.m[k];
  }
  return count;
}

CallMemory::CallMemory(const Lookup& lookup, bool is_backward, Workspace& workspace)
    : device(lookup.device), precision(lookup.precision) {
  int64_t slices = 0, head_places = 0;
  for (Table t : lookup.tables) {
    BlockLayout at = block_layout(t, precision, is_backward);
    const auto bytes = [&] { return at.size * static_cast<int64_t>(sizeof(float)); };
    t.is_tiled = bytes() + kStaticSharedBytes <= device.shared_bytes;
    if (!t.is_tiled) at = block_layout(t, Precision::kFloat32, is_backward);
    TT_CHECK(at.size <= kMaxBlockFloats, "tables must need at most ", kMaxBlockFloats * 4,
             " bytes a block on CUDA, got ", bytes(), " for ", shape_of(t));
    (t.is_tiled ? has_tiled : has_general) = true;
    int64_t& most = t.is_tiled ? shared_bytes : call.scratch_stride;
    most = std::max(most, t.is_tiled ? bytes() : at.size);
    for (int k = 0; k < t.num_cores; k++) {
      t.first_slice[k] = slices;
      slices += t.m[k];
    }
    if (t.num_cores == 4) {
      const int64_t places = std::min(t.m_head, lookup.plan.num_indices);
      has_heads = true;
      t.first_head_digit = heads.num_slots;
      t.first_head_place = head_places;
      t.heads_at = head_floats;
      heads.num_slots += t.m_head;
      head_places += places;
      head_floats += places * t.head_size();
      most_heads = std::max(most_heads, places);
      TT_CHECK(heads.num_slots <= kMaxHeadDigits, "tables of 4 cores must have at most ",
               kMaxHeadDigits, " pairs of their first two digits together on CUDA, got ",
               shape_of(t));
    }
    if (t.has_mid) call.longest_group = std::max(call.longest_group, t.m_head);
    max_dim = std::max(max_dim, t.dim());
    tables.push_back({t, at});
  }
  TT_CHECK(slices < INT_MAX && tables.size() <= kMaxTables,
           "tables must have less than 2^31 slices together and be at most ", kMaxTables,
           " on CUDA, got ", slices, " and ", tables.size());
  call.num_tables = static_cast<int>(tables.size());
  call.plan = lookup.plan;
  call.num_jobs = 8 * std::max(device.num_multiprocessors, 1);
  call.tables = workspace.take<CallTable>(call.num_tables);
  heads.slots = workspace.take<int32_t>(heads.num_slots);
  heads.counts = workspace.take<int32_t>(call.num_tables);
  heads.digits = workspace.take<int64_t>(head_places);
  call.head_slots = heads.slots;
  call.heads = workspace.take<float>(head_floats);
  const int64_t most_blocks = 2 * std::max(device.num_multiprocessors, 1);
  general_blocks = has_general ? std::clamp<int64_t>(num_windows(), 1, most_blocks) : 0;
  call.scratch = workspace.take<float>(general_blocks * call.scratch_stride);
}

void CallMemory::prepare(cudaStream_t stream) const {
  launch_upload(tables.data(), tables.size() * sizeof(CallTable), const_cast<CallTable*>(call.tables),
                stream);
  launch_heads(*this, stream);
}

}  // namespace torchrec_tt::cuda
