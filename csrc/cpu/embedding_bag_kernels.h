// The lookup, its gradient and the update of a slice, over one chunk of a plan's prefixes.
//
// Forward, per prefix:  P = head @ mid; per unique row:  row = P @ last.
// Backward, per prefix: P again; per unique row, with R its summed gradient:
//   grad last += P^T R,  grad P += R last^T;  then  grad mid += head^T grad P,  grad head += grad P mid^T.
#pragma once

#include "update.h"

namespace torchrec_tt::TT_ISA {

template <typename T>
static void transpose_slice(const T* slice, int64_t rank, int64_t ld_rank, int64_t n_last, T* out) {
  for (int64_t z = 0; z < n_last; z++) {
    for (int64_t b = 0; b < rank; b++) out[z * ld_rank + b] = slice[b * n_last + z];
    for (int64_t b = rank; b < ld_rank; b++) out[z * ld_rank + b] = 0;
  }
}

// The transposed last slice of a digit, made in `out`.
template <typename T>
TT_INLINE void transpose_digit(const TableView<T>& t, int64_t digit, T* out, T* scratch) {
  const int64_t size = t.rank * t.n_last;
  const T* slice = elements(t.last, t.storage, digit * size, size, scratch);
  transpose_slice(slice, t.rank, t.ld_rank, t.n_last, out);
}

template <typename T>
static void transpose_last(const TableView<T>& t, int64_t begin, int64_t end, T* out, T* scratch) {
  for (int64_t i = begin; i < end; i++) {
    transpose_digit(t, i, out + (i - begin) * t.padded_last_size(), scratch);
  }
}

// The same, made in `out` only where the table has none ready.
template <typename T>
TT_INLINE const T* last_slice(const TableView<T>& t, int64_t digit, T* out, T* scratch) {
  if (t.last_transposed) return t.last_transposed + digit * t.padded_last_size();
  transpose_digit(t, digit, out, scratch);
  return out;
}

// A slice [rows, rank] with rows of ld_rank: itself where they are equal, else a copy in `scratch`.
template <typename T>
TT_INLINE const T* padded(const T* slice, int64_t rows, int64_t rank, int64_t ld_rank, T* scratch) {
  if (rank == ld_rank) return slice;
  for (int64_t i = 0; i < rows; i++) {
    std::memcpy(scratch + i * ld_rank, slice + i * rank, rank * sizeof(T));
    for (int64_t b = rank; b < ld_rank; b++) scratch[i * ld_rank + b] = 0;
  }
  return scratch;
}

// Walks the prefixes of a chunk: their digits, the mid slice of their group and their product P.
template <typename T>
struct PrefixWalk {
  const TableView<T>& table;
  const PlanView& plan;
  T* mid_scratch;  // [padded_mid_size]
  T* slice_scratch;
  int64_t mid = -1;              // digit of the current group
  const T* mid_slice = nullptr;  // [r_head, n_mid * ld_rank]
  int64_t head = 0;              // the head's place in table.head
  const T* head_slice = nullptr;
  int64_t first_key = 0;  // key of the prefix's row with last digit 0

  int64_t mid_of(int64_t prefix) const {
    const int64_t key = plan.row_keys[plan.prefix_starts[prefix]] - table.key_base;
    return key / table.m_last / table.m_head;
  }

  T* last_scratch() const {
    return slice_scratch + prefixes_at_once(table) * table.head_size() + table.mid_size();
  }

  // Of the prefixes that are in use together, this is the one of number `slot`.
  void enter(int64_t prefix, int64_t slot = 0) {
    const int64_t key = plan.row_keys[plan.prefix_starts[prefix]] - table.key_base;
    const int64_t digits = key / table.m_last;
    const int64_t next_mid = digits / table.m_head;
    head = table.head_at ? table.head_at[prefix] : digits - next_mid * table.m_head;
    head_slice = elements(table.head, table.head_storage, head * table.head_size(),
                          table.head_size(), slice_scratch + slot * table.head_size());
    first_key = table.key_base + digits * table.m_last;
    if (next_mid == mid || !table.has_mid) return;
    mid = next_mid;
    T* wide = slice_scratch + prefixes_at_once(table) * table.head_size();
    mid_slice = padded(
        elements(table.mid, table.storage, mid * table.mid_size(), table.mid_size(), wide),
        table.r_head * table.n_mid, table.rank, table.ld_rank, mid_scratch);
  }

  // P [m_rows, ld_rank], in `out` unless the head slice is P already.
  const T* prefix_product(T* out) const {
    if (!table.has_mid) {
      return padded(head_slice, table.m_rows, table.rank, table.ld_rank, out);
    }
    const int64_t n = table.n_mid * table.ld_rank;
    product(head_slice, table.r_head, mid_slice, n, table.n_head, table.r_head, n, out, n);
    return out;
  }
};

template <typename T>
static void forward(const TableView<T>& t, const PlanView& plan, int64_t begin, int64_t end, T* rows,
                    int64_t first_row, T* scratch) {
  T* product_scratch = scratch;
  T* mid_scratch = product_scratch + t.product_size();
  T* last_scratch = mid_scratch + t.padded_mid_size();
  PrefixWalk<T> walk{t, plan, mid_scratch, last_scratch + t.padded_last_size()};
  const int64_t dim = t.dim();
  for (int64_t q = begin; q < end; q++) {
    walk.enter(q);
    const T* p = walk.prefix_product(product_scratch);
    for (int64_t u = plan.prefix_starts[q]; u < plan.prefix_starts[q + 1]; u++) {
      const T* last = last_slice(t, plan.row_keys[u] - walk.first_key, last_scratch,
                                 walk.last_scratch());
      product_transposed<T, false>(p, t.ld_rank, last, t.ld_rank, t.m_rows, t.n_last, t.ld_rank,
                                   rows + (u - first_row) * dim, t.n_last);
    }
  }
}

template <typename T>
static void pool(const T* rows, int64_t dim, const PlanView& plan, int64_t first_row, const T* scale,
                 int64_t begin, int64_t end, T* out) {
  if (begin == end) {
    for (int64_t j = 0; j < dim; j++) out[j] = 0;
    return;
  }
  const auto row = [&](int64_t i) { return rows + (plan.inverse[i] - first_row) * dim; };
  if (!scale && end - begin == 1) {
    std::memcpy(out, row(begin), dim * sizeof(T));
    return;
  }
  scaled<T, false>(row(begin), scale ? scale[begin] : T(1), dim, out);
  for (int64_t i = begin + 1; i < end; i++) {
    if (i + 4 < end) __builtin_prefetch(row(i + 4));
    scaled<T, true>(row(i), scale ? scale[i] : T(1), dim, out);
  }
}

// The gradient of unique row u, summed over its indices in order: in `scratch`, or in place.
template <typename T>
TT_INLINE const T* row_gradient(const PlanView& plan, const GradView<T>& grad, int64_t u,
                                int64_t dim, T* scratch) {
  const int64_t begin = plan.row_starts[u], end = plan.row_starts[u + 1];
  if (end - begin == 1 && !grad.scale) return grad.grad_output + grad.grad_at[plan.order[begin]];
  for (int64_t s = begin; s < end; s++) {
    const int64_t i = plan.order[s];
    const T* from = grad.grad_output + grad.grad_at[i];
    const T scale = grad.scale ? grad.scale[i] : T(1);
    if (s == begin) {
      scaled<T, false>(from, scale, dim, scratch);
    } else {
      scaled<T, true>(from, scale, dim, scratch);
    }
  }
  return scratch;
}

// The weight's gradient of each index of unique row u: <row, its bag's gradient>.
template <typename T>
static void weight_gradients(const PlanView& plan, const GradView<T>& grad, int64_t u, const T* row,
                             int64_t dim) {
  for (int64_t s = plan.row_starts[u]; s < plan.row_starts[u + 1]; s++) {
    const int64_t i = plan.order[s];
    const T* from = grad.grad_output + grad.grad_at[i];
    T sum;
    dot_block<T, 1, 1, false>(row, dim, from, dim, dim, &sum, 1);
    grad.grad_weights[i] = grad.weight_scale ? grad.weight_scale[i] * sum : sum;
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

// Gradients through the rows of one prefix: adds to the last slices', writes grad_p [m_rows, ld_rank].
template <typename T>
static void backward_rows(const TableView<T>& t, const PlanView& plan, const GradView<T>& grad,
                          const BackwardChunk<T>& chunk, const PrefixWalk<T>& walk, int64_t q,
                          const T* p, T* grad_p, T* scratch) {
  const int64_t dim = t.dim();
  T* row_scratch = scratch;
  T* last_scratch = row_scratch + kRowsAtOnce * dim;
  T* value_scratch = last_scratch + kRowsAtOnce * t.padded_last_size();
  OuterTerm<T> terms[kRowsAtOnce];
  const int64_t first = plan.prefix_starts[q], end = plan.prefix_starts[q + 1];
  for (int64_t u = first; u < end; u += kRowsAtOnce) {
    const int64_t count = end - u < kRowsAtOnce ? end - u : kRowsAtOnce;
    for (int64_t k = 0; k < count; k++) {
      const int64_t digit = plan.row_keys[u + k] - walk.first_key;
      const T* last = last_slice(t, digit, last_scratch + k * t.padded_last_size(),
                                 walk.last_scratch());
      const T* row = row_gradient(plan, grad, u + k, dim, row_scratch + k * dim);
      terms[k] = {row, last};
      T* grad_last = touch(chunk.last, chunk.last_touched, digit, t.padded_last_size());
      const OuterTerm<T> last_term{row, p};
      outer_product<T, true>(&last_term, 1, t.n_last, 1, t.ld_rank, t.n_last, t.m_rows, t.ld_rank,
                             grad_last, t.ld_rank);
      if (grad.grad_weights) {
        product_transposed<T, false>(p, t.ld_rank, last, t.ld_rank, t.m_rows, t.n_last, t.ld_rank,
                                     value_scratch, t.n_last);
        weight_gradients(plan, grad, u + k, value_scratch, dim);
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

template <typename T>
static void backward(const TableView<T>& t, const PlanView& plan, const GradView<T>& grad,
                     const CoreUpdate<T>& mid_update, const BackwardChunk<T>& chunk, T* scratch) {
  const int64_t depth = prefixes_at_once(t);
  T* product_scratch = scratch;
  T* grad_p = product_scratch + t.product_size();  // [depth, m_rows, ld_rank]
  T* mid_scratch = grad_p + depth * t.product_size();
  T* mid_grad_scratch = mid_scratch + t.padded_mid_size();
  T* row_scratch = mid_grad_scratch + t.padded_mid_size();
  T* slice_scratch = row_scratch + kRowsAtOnce * (t.dim() + t.padded_last_size()) + t.dim();
  OuterTerm<T> terms[kOuterDepth];
  PrefixWalk<T> walk{t, plan, mid_scratch, slice_scratch};
  const int64_t n = t.n_mid * t.ld_rank;
  int64_t q = chunk.prefix_begin;
  while (q < chunk.prefix_end) {
    const int64_t mid = walk.mid_of(q);
    const int shared = mid == chunk.shared_first ? 0 : mid == chunk.shared_last ? 1 : -1;
    T* grad_mid = shared >= 0 ? chunk.shared[shared] : mid_grad_scratch;
    if (t.has_mid) std::memset(grad_mid, 0, t.padded_mid_size() * sizeof(T));
    bool same_group = true;
    while (same_group) {
      int64_t count = 0;
      for (; count < depth && same_group; count++, q++) {
        walk.enter(q, count);
        const T* p = walk.prefix_product(product_scratch);
        T* grad_p_q = grad_p + count * t.product_size();
        backward_rows(t, plan, grad, chunk, walk, q, p, grad_p_q, row_scratch);
        T* grad_head = touch(chunk.head, chunk.head_touched, walk.head, t.head_size());
        if (t.has_mid) {
          product_transposed<T, true>(grad_p_q, n, walk.mid_slice, n, t.n_head, t.r_head, n,
                                      grad_head, t.r_head);
          terms[count] = {walk.head_slice, grad_p_q};
        } else {
          for (int64_t i = 0; i < t.m_rows; i++) {
            scaled<T, true>(grad_p_q + i * t.ld_rank, T(1), t.rank, grad_head + i * t.rank);
          }
        }
        same_group = q + 1 < chunk.prefix_end && walk.mid_of(q + 1) == mid;
      }
      if (t.has_mid) {
        outer_product<T, true>(terms, count, t.r_head, 1, n, t.r_head, t.n_head, n, grad_mid, n);
      }
    }
    if (t.has_mid && shared < 0) {
      update(mid_update, mid * t.mid_size(), grad_mid, t.r_head * t.n_mid, t.rank, t.ld_rank);
    }
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
      : slice0(elements(h.core0, h.storage, digit / h.m1 * h.size0(), h.size0(), scratch)),
        slice1(elements(h.core1, h.storage, digit % h.m1 * h.size1(), h.size1(),
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
  return {kWidth<T>, &forward<T>, &pool<T>, &backward<T>, &transpose_last<T>, &update<T>,
          &add<T>,   &head_forward<T>, &head_grad0<T>, &head_grad1<T>};
}

}  // namespace torchrec_tt::TT_ISA
