// The lookup, its gradient and the update of a slice, over one chunk of a plan's prefixes.
//
// Forward, per prefix:  P = head @ mid; per unique row:  row = P @ last.
// Backward, per prefix: P again; per unique row, with R its summed gradient:
//   grad last += P^T R,  grad P += R last^T;  then  grad mid += head^T grad P,  grad head += grad P mid^T.
#pragma once

#include "peak.h"
#include "prefix_batch.h"
#include "row_cache_kernels.h"
#include "row_tags_kernels.h"
#include "update.h"

namespace torchrec_tt::TT_ISA {

// Rows of heads in a group for which its mid slice is transposed: that costs what dot products cost
// so many rows beyond a matrix product.
constexpr int64_t kRowsToTranspose = TT_VECTOR_BYTES == 64 ? 16 : 8;

// The transposed last slice of a digit, made in `out`.
template <typename T>
TT_INLINE void transpose_digit(const TableView<T>& t, int64_t digit, T* out, T* scratch) {
  const int64_t size = t.rank * t.n_last;
  transpose(slice_elements(t.last, t.storage, digit, size, scratch), t.rank, t.n_last, t.n_last, out,
            t.ld_rank);
}

template <typename T>
static void transpose_last(const TableView<T>& t, int64_t begin, int64_t end, T* out, T* scratch) {
  for (int64_t i = begin; i < end; i++) {
    transpose_digit(t, i, out + (i - begin) * t.padded_last_size(), scratch);
  }
}

// The way back: out [rank, n_last] from a transposed slice [n_last, ld_rank].
template <typename T>
static void restore_last(const TableView<T>& t, const T* transposed, T* out) {
  transpose(transposed, t.n_last, t.rank, t.ld_rank, out, t.n_last);
}

// The transposed last slice of a digit, made in `out` only where the table has none ready.
template <typename T>
TT_INLINE const T* last_slice(const TableView<T>& t, int64_t digit, T* out, T* scratch) {
  if (t.last_transposed) return t.last_transposed + digit * t.padded_last_size();
  transpose_digit(t, digit, out, scratch);
  return out;
}

// Slices and gradients lie anywhere, and are asked for this far ahead.
constexpr int64_t kRowsAhead = 4;

// Asks for the last slice of unique row u, of the batch's prefix k, and for its gradient.
template <typename T>
TT_INLINE void prefetch_last(const PrefixBatch<T>& batch, int64_t k, int64_t u,
                             const T* grad_last = nullptr) {
  const TableView<T>& t = batch.table;
  const int64_t size = t.padded_last_size(), at = (batch.plan.row_keys[u] - batch.first_key[k]) * size;
  if (t.last_transposed) prefetch(t.last_transposed + at, size);
  if (grad_last) prefetch(grad_last + at, size);
}

template <typename T>
static void forward(const TableView<T>& t, const PlanView& plan, int64_t begin, int64_t end, T* rows,
                    int64_t first_row, T* scratch) {
  const ChunkScratch<T> at(t, false, scratch);
  PrefixBatch<T> batch(t, plan, at);
  const int64_t dim = t.dim();
  for (int64_t q = begin; q < end; q += batch.count) {
    batch.take(q, end);
    for (int64_t k = 0; k < batch.count; k++) {
      batch.prefetch_part_of_next_mid();
      const int64_t end_row = plan.prefix_starts[q + k + 1];
      for (int64_t u = plan.prefix_starts[q + k]; u < end_row; u++) {
        if (u + kRowsAhead < end_row) prefetch_last(batch, k, u + kRowsAhead);
        const int64_t digit = plan.row_keys[u] - batch.first_key[k];
        const T* last = last_slice(t, digit, at.last, at.wide_last);
        product_transposed<T, false>(batch.product_of[k], t.ld_rank, last, t.ld_rank, t.m_rows,
                                     t.n_last, t.ld_rank, rows + (u - first_row) * dim, t.n_last);
      }
    }
  }
}

template <typename T>
static void pool(const RowsView<T>& rows, int64_t dim, const PlanView& plan, const T* scale,
                 const int64_t* bags, int64_t begin, int64_t end, T* out, int64_t ld_out,
                 T* scratch) {
  // A row lies anywhere, and is asked for some indices before; output is large, and asked for as well.
  constexpr int64_t kAhead = 16, kBagsAhead = 8;
  const auto row = [&](int64_t i) { return read_row(rows, plan, plan.inverse[i], dim, scratch); };
  const int64_t last = bags ? bags[end] : end;
  for (int64_t bag = begin; bag < end; bag++, out += ld_out) {
    const int64_t first = bags ? bags[bag] : bag, next = bags ? bags[bag + 1] : bag + 1;
    if (bag + kBagsAhead < end) prefetch_to_write(out + kBagsAhead * ld_out, dim);
    if (first == next) std::memset(out, 0, dim * sizeof(T));
    for (int64_t i = first; i < next; i++) {
      if (i + kAhead < last) prefetch_row(rows, plan, plan.inverse[i + kAhead], dim);
      if (i > first) {
        scaled<T, true>(row(i), scale ? scale[i] : T(1), dim, out);
      } else if (scale) {
        scaled<T, false>(row(i), scale[i], dim, out);
      } else {
        copy(row(i), dim, out);
      }
    }
  }
}

template <typename T>
TT_INLINE T* touch(T* slices, uint8_t* touched, int64_t digit, int64_t size) {
  T* slice = slices + digit * size;
  if (!touched[digit]) {
    touched[digit] = 1;
    std::memset(slice, 0, size * sizeof(T));
  }
  return slice;
}

// Asks for what unique row u needs, of the batch's prefix k.
template <typename T>
TT_INLINE void prefetch_row_gradient(const GradView<T>& grad, const BackwardChunk<T>& chunk,
                                     const PrefixBatch<T>& batch, int64_t k, int64_t u) {
  const PlanView& plan = batch.plan;
  const int64_t begin = plan.row_starts[u], past = plan.row_starts[u + 1];
  for (int64_t s = begin; s < past && s < begin + 4; s++) {
    prefetch<kLater>(grad.grad_output + grad.sorted_at[s], batch.table.dim());
  }
  prefetch_last(batch, k, u, chunk.last);
}

// Asks for what the first rows of the batch's prefix k need.
template <typename T>
TT_INLINE void prefetch_rows(const GradView<T>& grad, const BackwardChunk<T>& chunk,
                             const PrefixBatch<T>& batch, int64_t k) {
  const int64_t first = batch.plan.prefix_starts[batch.first + k];
  const int64_t end = batch.plan.prefix_starts[batch.first + k + 1];
  for (int64_t u = first; u < end && u < first + kRowsAhead; u++) {
    prefetch_row_gradient(grad, chunk, batch, k, u);
  }
}

// Gradients through the rows of the batch's prefix k: adds to the last slices', writes its grad_p.
template <typename T>
static void backward_rows(const TableView<T>& t, const GradView<T>& grad,
                          const BackwardChunk<T>& chunk, const PrefixBatch<T>& batch, int64_t k,
                          const ChunkScratch<T>& at) {
  const PlanView& plan = batch.plan;
  const int64_t dim = t.dim();
  const T* p = batch.product_of[k];
  T* grad_p = at.grad_products + k * t.product_size();
  OuterTerm<T> terms[kRowsAtOnce];
  const int64_t q = batch.first + k, first = plan.prefix_starts[q], end = plan.prefix_starts[q + 1];
  for (int64_t u = first; u < end; u += kRowsAtOnce) {
    const int64_t count = end - u < kRowsAtOnce ? end - u : kRowsAtOnce;
    for (int64_t i = 0; i < count; i++) {
      if (u + i + kRowsAhead < end) {
        prefetch_row_gradient(grad, chunk, batch, k, u + i + kRowsAhead);
      }
      const int64_t digit = plan.row_keys[u + i] - batch.first_key[k];
      const T* last = last_slice(t, digit, at.lasts + i * t.padded_last_size(), at.wide_last);
      const T* row = row_gradient(plan, grad, u + i, dim, at.rows + i * dim);
      terms[i] = {row, last};
      T* grad_last = touch(chunk.last, chunk.last_touched, digit, t.padded_last_size());
      const OuterTerm<T> last_term{row, p};
      outer_product<T, true>(&last_term, 1, t.n_last, 1, t.ld_rank, t.n_last, t.m_rows, t.ld_rank,
                             grad_last, t.ld_rank);
      if (grad.grad_weights) {
        product_transposed<T, false>(p, t.ld_rank, last, t.ld_rank, t.m_rows, t.n_last, t.ld_rank,
                                     at.values, t.n_last);
        weight_gradients(plan, grad, u + i, at.values, dim);
      }
    }
    if (u == first) {
      outer_product<T, false>(terms, count, 1, t.n_last, t.ld_rank, t.m_rows, t.n_last, t.ld_rank,
                              grad_p, t.ld_rank);
    } else {
      outer_product<T, true>(terms, count, 1, t.n_last, t.ld_rank, t.m_rows, t.n_last, t.ld_rank,
                             grad_p, t.ld_rank);
    }
  }
}

// Gradients of the batch's heads: grad_p mid^T, through a transposed mid slice if there is one.
template <typename T>
static void backward_heads(const TableView<T>& t, const BackwardChunk<T>& chunk,
                           const PrefixBatch<T>& batch, const T* mid_transposed,
                           const ChunkScratch<T>& at) {
  const int64_t n = t.n_mid * t.ld_rank;
  if (mid_transposed) {
    product(at.grad_products, n, mid_transposed, t.ld_head, batch.count * t.n_head, n, t.ld_head,
            at.grad_heads, t.ld_head);
  }
  for (int64_t k = 0; k < batch.count; k++) {
    T* grad_head = touch(chunk.head, chunk.head_touched, batch.head[k], t.head_size());
    const T* grad_p = at.grad_products + k * t.product_size();
    if (t.has_mid && !mid_transposed) {
      product_transposed<T, true>(grad_p, n, batch.mid_slice, n, t.n_head, t.r_head, n, grad_head,
                                  t.r_head);
      continue;
    }
    const T* from = mid_transposed ? at.grad_heads + k * t.n_head * t.ld_head : grad_p;
    const int64_t ld = mid_transposed ? t.ld_head : t.ld_rank;
    for (int64_t i = 0; i < t.n_head; i++) {
      scaled<T, true>(from + i * ld, T(1), t.r_head, grad_head + i * t.r_head);
    }
  }
}

// Adds the batch's head^T grad_p to the gradient of its mid slice; the group's last batch steps it.
template <typename T>
static void backward_mid(const TableView<T>& t, const CoreUpdate<T>& update_mid,
                         const BackwardChunk<T>& chunk, const PrefixBatch<T>& batch, bool is_first,
                         bool is_last, const ChunkScratch<T>& at) {
  const int64_t n = t.n_mid * t.ld_rank, mid_at = batch.mid * t.mid_size();
  const int shared = batch.mid == chunk.shared_first ? 0 : batch.mid == chunk.shared_last ? 1 : -1;
  T* grad_mid = shared >= 0 ? chunk.shared[shared] : at.grad_mid;
  const OuterTerm<T> term{at.heads, at.grad_products};
  const int64_t depth = batch.count * t.n_head;
  const auto add_to = [&](auto is_start, auto is_step, const OuterTarget<T>& to) {
    outer_products<T, is_start.value, is_step.value>(&term, 1, t.r_head, 1, n, t.r_head, depth, n,
                                                     to, n);
  };
  constexpr std::true_type kYes;
  constexpr std::false_type kNo;
  if (is_last && shared < 0 && t.rank == t.ld_rank && is_plain_sgd(update_mid)) {
    T* weight = static_cast<T*>(update_mid.weight) + mid_at;
    const OuterTarget<T> to{weight, grad_mid, -update_mid.learning_rate};
    return is_first ? add_to(kNo, kYes, to) : add_to(kYes, kYes, to);
  }
  const OuterTarget<T> to{grad_mid, grad_mid, T(1)};
  is_first ? add_to(kNo, kNo, to) : add_to(kYes, kNo, to);
  if (is_last && shared < 0) {
    update(update_mid, mid_at, grad_mid, t.r_head * t.n_mid, t.rank, t.ld_rank);
  }
}

template <typename T>
static void backward(const TableView<T>& t, const PlanView& plan, const GradView<T>& grad,
                     const CoreUpdate<T>& mid_update, const BackwardChunk<T>& chunk, T* scratch) {
  const ChunkScratch<T> at(t, true, scratch);
  PrefixBatch<T> batch(t, plan, at);
  const int64_t n = t.n_mid * t.ld_rank;
  const T* mid_transposed = nullptr;
  bool is_first = true;  // of its group
  for (int64_t q = chunk.prefix_begin; q < chunk.prefix_end; q += batch.count) {
    batch.take(q, chunk.prefix_end);
    prefetch_rows(grad, chunk, batch, 0);
    for (int64_t k = 0; k < batch.count; k++) {
      if (k + 1 < batch.count) prefetch_rows(grad, chunk, batch, k + 1);
      batch.prefetch_part_of_next_mid();
      backward_rows(t, grad, chunk, batch, k, at);
    }
    if (is_first && t.has_mid) {
      mid_transposed = nullptr;
      if (batch.count * t.n_head >= kRowsToTranspose) {
        transpose(batch.mid_slice, t.r_head, n, n, at.mid_transposed, t.ld_head);
        mid_transposed = at.mid_transposed;
      }
    }
    backward_heads(t, chunk, batch, mid_transposed, at);
    const bool is_last = batch.ends_group(chunk.prefix_end);
    if (t.has_mid) backward_mid(t, mid_update, chunk, batch, is_first, is_last, at);
    is_first = is_last;
  }
}

template <typename T>
static void add(const T* from, int64_t n, T* to) {
  scaled<T, true>(from, T(1), n, to);
}

// The slices of cores 0 and 1 whose product is a head.
template <typename T>
struct HeadSlices {
  const T* slice0;  // [n0, r1]
  const T* slice1;  // [r1, n1 * r2]

  HeadSlices(const HeadPair<T>& h, int64_t digit, T* scratch)
      : slice0(slice_elements(h.core0, h.storage, digit / h.m1, h.size0(), scratch)),
        slice1(slice_elements(h.core1, h.storage, digit % h.m1, h.size1(),
                              scratch + (h.scratch() ? h.size0() : 0))) {}
};

template <typename T>
static void head_forward(const HeadPair<T>& h, int64_t digit, T* head, T* scratch) {
  const HeadSlices<T> s(h, digit, scratch);
  const int64_t n = h.n1 * h.r2;
  product(s.slice0, h.r1, s.slice1, n, h.n0, h.r1, n, head, n);
}

template <typename T>
static void head_grad0(const HeadPair<T>& h, int64_t digit, const T* grad_head, T* grad0,
                       T* scratch) {
  const HeadSlices<T> s(h, digit, scratch);
  const int64_t n = h.n1 * h.r2;
  product_transposed<T, true>(grad_head, n, s.slice1, n, h.n0, h.r1, n, grad0, h.r1);
}

template <typename T>
static void head_grad1(const HeadPair<T>& h, int64_t digit, const T* grad_head, T* grad1,
                       T* scratch) {
  const HeadSlices<T> s(h, digit, scratch);
  const int64_t n = h.n1 * h.r2;
  const OuterTerm<T> term{s.slice0, grad_head};
  outer_product<T, true>(&term, 1, h.r1, 1, n, h.r1, h.n0, n, grad1, n);
}

template <typename T>
constexpr Kernels<T> make_kernels() {
  return {kWidth<T>,
          &forward<T>,
          &pool<T>,
          &backward<T>,
          &transpose_last<T>,
          &restore_last<T>,
          &update<T>,
          &add<T>,
          &head_forward<T>,
          &head_grad0<T>,
          &head_grad1<T>,
          &find_slots,
          &cached_weight_gradients<T>,
          &step_rows<T>,
          &multiply_adds<T>};
}

}  // namespace torchrec_tt::TT_ISA
