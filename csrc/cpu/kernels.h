// What the instruction-set specific kernels take and give; plain pointers, no torch.
#pragma once

#include <cstdint>

namespace torchrec_tt {

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

struct PlanView {
  const int32_t* order;          // [N]
  const int32_t* inverse;        // [N]
  const int64_t* row_keys;       // [U]
  const int32_t* row_starts;     // [U + 1]
  const int32_t* prefix_starts;  // [Q + 1]
  int64_t num_indices;           // N
};

// How the elements of a core are kept: as T, in which all sums are, in 16 bits, or in 8 with a float
// behind every slice, its scale, as FBGEMM keeps quantised rows; these are looked up, not stepped.
enum class Storage { kNative, kBFloat16, kFloat16, kInt8 };
constexpr int64_t kScaleBytes = 4;

// One table as head, mid and last (tt_shape.h). P of a prefix is [m_rows, rank], padded to ld_rank.
template <typename T>
struct TableView {
  int64_t n_head, r_head;  // a head slice is [n_head, r_head]
  int64_t ld_head;         // r_head rounded up to the vector width
  int64_t n_mid;           // a mid slice is [r_head, n_mid, rank]
  int64_t rank, ld_rank;   // ld_rank: rank rounded up to the vector width
  int64_t n_last;          // a last slice is [rank, n_last]
  int64_t m_rows;          // n_head * n_mid
  int64_t m_head, m_mid, m_last, key_base;
  bool has_mid;             // false: P is the head slice
  Storage storage;          // of mid and last
  Storage head_storage;     // of head: T for 4 cores, whose heads are products
  const void* head;         // [heads, n_head * r_head]
  const int32_t* head_at;   // [Q] a prefix's place in head, or null: its head digit
  const void* mid;          // [m_mid, r_head * n_mid * rank]
  const void* last;         // [m_last, rank * n_last]
  const T* last_transposed;  // [m_last, n_last * ld_rank] or null: transposed row by row

  int64_t dim() const { return m_rows * n_last; }
  int64_t head_size() const { return n_head * r_head; }
  int64_t mid_size() const { return r_head * n_mid * rank; }
  int64_t padded_mid_size() const { return r_head * n_mid * ld_rank; }
  int64_t product_size() const { return m_rows * ld_rank; }
  int64_t padded_last_size() const { return n_last * ld_rank; }
};

// Gradients of the output as each index sees them.
template <typename T>
struct GradView {
  const T* grad_output;      // [B, columns]
  const int64_t* sorted_at;  // [N] where the bag of a sorted position's index begins in grad_output
  const T* scale;            // [N] per-sample weight over mean length, or null for 1
  const T* weight_scale;     // [N] 1 over mean length, or null for 1
  T* grad_weights;           // [N] or null
};

// Where the unique rows of a table are read: computed ones in order, cached ones in their slots.
template <typename T>
struct RowsView {
  const T* computed;           // [end_row - first_row, dim]
  int64_t first_row, end_row;  // the unique rows that were computed
  const void* cached;          // [C, dim], not read where no unique row is cached
  Storage storage;             // of the cached rows
  int64_t cached_key;          // key of slot 0
};

// The slots of a table's cache: which rows they hold, and the key of slot 0 in the plan.
struct CachedSlots {
  const int64_t* ids;  // [C]
  int64_t key_base;
};

enum class Optimizer { kSgd, kAdagrad, kRowwiseAdagrad, kAdam };

// What to do with the gradient of a core's slice (update.h).
template <typename T>
struct CoreUpdate {
  T* grad = nullptr;  // not null: store it here, like the core, and step nothing
  Optimizer optimizer = Optimizer::kSgd;
  T learning_rate = 0, eps = 0, beta1 = 0, beta2 = 0, weight_decay = 0;
  bool decoupled_weight_decay = false;
  T step_size = 0, bias2_sqrt = 1;  // adam: lr / (1 - b1^t), sqrt(1 - b2^t)
  void* weight = nullptr;
  Storage storage = Storage::kNative;
  bool is_stochastic = false;  // how a 16-bit core is rounded
  uint64_t rounding_key = 0;   // of the table, the core and the step
  int64_t rounding_shift = 0;  // from an element's place in the core to the one that rounds it
  T* moment1 = nullptr;        // adagrad: like the core; rowwise_adagrad: [m_k]; adam: like the core
  T* moment2 = nullptr;        // adam: like the core
};

// Prefixes [prefix_begin, prefix_end) of one table, and the gradients that they alone own.
template <typename T>
struct BackwardChunk {
  int64_t prefix_begin, prefix_end;
  int64_t shared_first, shared_last;  // mid digits shared with the chunk before and after, or -1
  T* head;                // [heads, n_head * r_head]
  uint8_t* head_touched;  // [heads]
  T* last;                // [m_last, n_last * ld_rank]
  uint8_t* last_touched;  // [m_last]
  T* shared[2];           // [padded_mid_size] gradients of the shared mid slices
};

constexpr int64_t kRowsAtOnce = 16;      // rows of a prefix whose gradients are gathered together
constexpr int64_t kHeadRowsAtOnce = 64;  // rows of the heads that are multiplied with a mid slice at once
constexpr int64_t kPrefixesAtOnce = kHeadRowsAtOnce;  // at most, where a head has one row

template <typename T>
int64_t prefixes_at_once(const TableView<T>& table) {
  return table.n_head >= kHeadRowsAtOnce / 4 ? 4 : kHeadRowsAtOnce / table.n_head;
}

// What one worker needs for the prefixes it has in hand, in one piece of memory of `size` elements.
template <typename T>
struct ChunkScratch {
  int64_t size = 0;
  T *heads, *products, *mid, *last, *wide_mid, *wide_last;
  // backward only
  T *grad_products, *grad_heads, *grad_mid, *mid_transposed, *rows, *lasts, *values;

  ChunkScratch(const TableView<T>& t, bool is_backward, T* from = nullptr) {
    const auto take = [&](int64_t elements) {
      T* piece = from ? from + size : nullptr;
      size += round_up(elements, 64 / sizeof(T));  // whole cache lines
      return piece;
    };
    const int64_t depth = prefixes_at_once(t);
    heads = take(depth * t.head_size());
    products = take(depth * t.product_size());
    mid = take(t.padded_mid_size());
    last = take(t.padded_last_size());
    const bool is_native = t.storage == Storage::kNative;
    wide_mid = take(is_native ? 0 : t.mid_size());
    wide_last = take(is_native ? 0 : t.rank * t.n_last);
    if (!is_backward) return;
    grad_products = take(depth * t.product_size());
    grad_heads = take(depth * t.n_head * t.ld_head);
    grad_mid = take(t.padded_mid_size());
    mid_transposed = take(t.n_mid * t.ld_rank * t.ld_head);
    rows = take(kRowsAtOnce * t.dim());
    lasts = take(kRowsAtOnce * t.padded_last_size());
    values = take(t.dim());
  }
};

constexpr int kSumsOfPeak = 12;  // more than a multiply-add's latency times its throughput, 4 x 2

// The two outer cores of a 4-core table, whose products are the heads.
template <typename T>
struct HeadPair {
  int64_t n0, r1, n1, r2;     // slices [n0, r1] and [r1, n1 * r2]; a head is [n0 * n1, r2]
  int64_t m1;                 // head digit = i0 * m1 + i1
  const void* core0;
  const void* core1;
  Storage storage;
  int64_t size0() const { return n0 * r1; }
  int64_t size1() const { return r1 * n1 * r2; }
  int64_t head_size() const { return n0 * n1 * r2; }
  int64_t scratch() const { return storage == Storage::kNative ? 0 : size0() + size1(); }
};

template <typename T>
struct Kernels {
  int64_t width;  // elements of a vector: ld_rank is a multiple of it
  // rows[(u - first_row) * dim] for the unique rows u of prefixes [begin, end)
  void (*forward)(const TableView<T>&, const PlanView&, int64_t begin, int64_t end, T* rows,
                  int64_t first_row, T* scratch);
  // out = sum of scale[i] * row inverse[i] for every bag in [begin, end), in rows of ld_out;
  // i in [bags[bag], bags[bag + 1]), or i = bag where bags is null; scratch [dim]
  void (*pool)(const RowsView<T>&, int64_t dim, const PlanView&, const T* scale,
               const int64_t* bags, int64_t begin, int64_t end, T* out, int64_t ld_out, T* scratch);
  void (*backward)(const TableView<T>&, const PlanView&, const GradView<T>&, const CoreUpdate<T>& mid,
                   const BackwardChunk<T>&, T* scratch);
  void (*transpose_last)(const TableView<T>&, int64_t begin, int64_t end, T* out, T* scratch);
  void (*restore_last)(const TableView<T>&, const T* transposed, T* out);
  // stores, or steps the core on, the gradient of its [rows, cols] slice at `offset`, in rows of ld
  void (*update)(const CoreUpdate<T>&, int64_t offset, const T* grad, int64_t rows, int64_t cols,
                 int64_t ld);
  void (*add)(const T* from, int64_t n, T* to);
  void (*head_forward)(const HeadPair<T>&, int64_t digit, T* head, T* scratch);
  // grad0 [n0 * r1] += and grad1 [r1 * n1 * r2] += what the head's gradient gives its two slices
  void (*head_grad0)(const HeadPair<T>&, int64_t digit, const T* grad_head, T* grad0,
                     T* scratch);
  void (*head_grad1)(const HeadPair<T>&, int64_t digit, const T* grad_head, T* grad1,
                     T* scratch);
  // slots[i]: where row ids[i] lies among num_sets > 0 sets of tags (row_tags.h), or -1
  void (*find_slots)(const int64_t* ids, int64_t n, const int64_t* tags, int64_t num_sets,
                     int64_t* slots);
  // the weights' gradients of the indices of cached unique rows [begin, end); scratch [dim]
  void (*cached_weight_gradients)(const RowsView<T>&, int64_t dim, const PlanView&,
                                  const GradView<T>&, int64_t begin, int64_t end, T* scratch);
  // steps cached unique rows [begin, end) of one table on their summed gradients; scratch [dim]
  void (*step_rows)(const CoreUpdate<T>&, const CachedSlots&, int64_t dim, const PlanView&,
                    const GradView<T>&, int64_t begin, int64_t end, T* scratch);
  // `rounds` times kSumsOfPeak multiply-adds of vectors in registers; the result means nothing
  T (*multiply_adds)(int64_t rounds);
};

extern const Kernels<float> kGenericFloat;
extern const Kernels<double> kGenericDouble;
#if defined(__x86_64__)
extern const Kernels<float> kAvx2Float;
extern const Kernels<float> kAvx512Float;
#endif

}  // namespace torchrec_tt
