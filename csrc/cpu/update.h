// What the gradient of a core's slice becomes: it is stored, or it steps the slice.
//
//   sgd              w -= lr g
//   adagrad          s += g^2;  w -= lr g / (sqrt(s) + eps)
//   rowwise_adagrad  s += mean(g^2) over the slice;  w -= lr g / (sqrt(s) + eps)
//   adam             m += (1 - b1)(g - m);  v = b2 v + (1 - b2) g^2;
//                    w -= lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)
// Weight decay comes before: g += wd w, or w *= 1 - lr wd where it is decoupled.
#pragma once

#include <cmath>

#include "storage.h"

namespace torchrec_tt::TT_ISA {

constexpr int64_t kElementsAtOnce = 256;

// Whether a step is w -= lr g and nothing else, which a sum can do where it is made.
template <typename T>
TT_INLINE bool is_plain_sgd(const CoreUpdate<T>& u) {
  return !u.grad && u.optimizer == Optimizer::kSgd && u.storage == Storage::kNative &&
         u.weight_decay == 0;
}

// Steps n elements w; `at` is their place in the core's moments, `scale` rowwise_adagrad's factor.
template <typename T>
TT_INLINE void step_elements(const CoreUpdate<T>& u, const T* g, int64_t at, int64_t n, T scale,
                             T* w) {
  if (u.decoupled_weight_decay) {
    for (int64_t i = 0; i < n; i++) w[i] *= 1 - u.learning_rate * u.weight_decay;
  }
  if (u.optimizer == Optimizer::kSgd) {
    scaled<T, true>(g, -u.learning_rate, n, w);
  } else if (u.optimizer == Optimizer::kRowwiseAdagrad) {
    scaled<T, true>(g, -scale, n, w);
  } else if (u.optimizer == Optimizer::kAdagrad) {
    T* sum = u.moment1 + at;
    for (int64_t i = 0; i < n; i++) {
      sum[i] += g[i] * g[i];
      w[i] -= u.learning_rate * g[i] / (std::sqrt(sum[i]) + u.eps);
    }
  } else {
    T* mean = u.moment1 + at;
    T* square = u.moment2 + at;
    for (int64_t i = 0; i < n; i++) {
      mean[i] += (1 - u.beta1) * (g[i] - mean[i]);
      square[i] = u.beta2 * square[i] + (1 - u.beta2) * g[i] * g[i];
      w[i] -= u.step_size * mean[i] / (std::sqrt(square[i]) / u.bias2_sqrt + u.eps);
    }
  }
}

// Calls f(place in the core, n, w, gradient with coupled weight decay) for pieces of a slice.
template <typename T, typename F>
TT_INLINE void for_pieces(const CoreUpdate<T>& u, int64_t offset, const T* grad, int64_t rows,
                          int64_t cols, int64_t ld, const F& f) {
  T wide[kElementsAtOnce], decayed[kElementsAtOnce];
  const bool is_coupled = u.weight_decay != 0 && !u.decoupled_weight_decay;
  const int64_t most = u.storage == Storage::kNative && !is_coupled ? cols : kElementsAtOnce;
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t j = 0; j < cols; j += most) {
      const int64_t at = offset + i * cols + j, n = cols - j < most ? cols - j : most;
      T* w = const_cast<T*>(elements<T>(u.weight, u.storage, at, n, wide));
      const T* g = grad + i * ld + j;
      if (is_coupled) {
        for (int64_t e = 0; e < n; e++) decayed[e] = g[e] + u.weight_decay * w[e];
        g = decayed;
      }
      f(at, n, w, g);
    }
  }
}

// Stores or steps the [rows, cols] slice at `offset` of a core; its gradient has rows of ld.
template <typename T>
static void update(const CoreUpdate<T>& u, int64_t offset, const T* grad, int64_t rows,
                   int64_t cols, int64_t ld) {
  if (ld == cols) {
    cols *= rows;
    rows = 1;
    ld = cols;
  }
  if (u.grad) {
    for (int64_t i = 0; i < rows; i++) {
      std::memcpy(u.grad + offset + i * cols, grad + i * ld, cols * sizeof(T));
    }
    return;
  }
  T scale = 0;
  if (u.optimizer == Optimizer::kRowwiseAdagrad) {
    T squares = 0;
    for_pieces(u, offset, grad, rows, cols, ld, [&](int64_t, int64_t n, T*, const T* g) {
      T total;
      dot_block<T, 1, 1, false>(g, n, g, n, n, &total, 1);
      squares += total;
    });
    T& sum = u.moment1[offset / (rows * cols)];
    sum += squares / static_cast<T>(rows * cols);
    scale = u.learning_rate / (std::sqrt(sum) + u.eps);
  }
  const Rounding rounding(u.is_stochastic, u.rounding_key);
  for_pieces(u, offset, grad, rows, cols, ld, [&](int64_t at, int64_t n, T* w, const T* g) {
    step_elements(u, g, at, n, scale, w);
    if constexpr (std::is_same_v<T, float>) {
      if (u.storage != Storage::kNative) {
        store_rounded(w, u.storage, rounding, at, u.rounding_shift, n, u.weight);
      }
    }
  });
}

}  // namespace torchrec_tt::TT_ISA
