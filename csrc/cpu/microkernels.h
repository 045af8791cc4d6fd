// Small matrix products on compiler vectors, compiled once per instruction set (see isa_*.cpp).
//
// Every product sums its terms in an order that depends on the matrix sizes only. A leading
// dimension is `ld_`; N need not be a multiple of the vector width unless said so.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if !defined(TT_ISA) || !defined(TT_VECTOR_BYTES)
#error "include this from an isa_*.cpp, which names the instruction set"
#endif

#define TT_INLINE static inline __attribute__((always_inline))
// Loops over a tile's registers: unrolled, or the tile would live in memory.
#define TT_UNROLL _Pragma("GCC unroll 16")

namespace torchrec_tt::TT_ISA {

template <typename T>
constexpr int64_t kWidth = TT_VECTOR_BYTES / sizeof(T);

template <typename T, int kLanes>
struct Lanes {
  typedef T type __attribute__((vector_size(sizeof(T) * kLanes), aligned(alignof(T)), may_alias));
};
template <typename T>
using Vec = typename Lanes<T, kWidth<T>>::type;

template <typename T>
TT_INLINE Vec<T> load(const T* p) {
  return *reinterpret_cast<const Vec<T>*>(p);
}
template <typename T>
TT_INLINE void store(T* p, Vec<T> v) {
  *reinterpret_cast<Vec<T>*>(p) = v;
}

template <typename T>
TT_INLINE T sum_lanes(Vec<T> v) {
  T sum = v[0];
  for (int64_t i = 1; i < kWidth<T>; i++) sum += v[i];
  return sum;
}

typedef Lanes<float, 4>::type Quad;

// Adds neighbours within every 16 bytes: of (a, b) gives [a0 + a1, a2 + a3, b0 + b1, b2 + b3].
TT_INLINE Vec<float> add_pairs(Vec<float> a, Vec<float> b) {
#if TT_VECTOR_BYTES == 64
  return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
         __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
#elif TT_VECTOR_BYTES == 32
  return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
         __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
#else
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

// The sum of a vector's 16-byte parts.
TT_INLINE Quad add_quads(Vec<float> v) {
#if TT_VECTOR_BYTES == 64
  const auto half = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) +
         __builtin_shufflevector(half, half, 4, 5, 6, 7);
#elif TT_VECTOR_BYTES == 32
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
  return v;
#endif
}

// out[0..3] (+)= the lane sums of a, b, c, d.
template <typename T, bool kAdd>
TT_INLINE void store_sums(Vec<T> a, Vec<T> b, Vec<T> c, Vec<T> d, T* out) {
  if constexpr (std::is_same_v<T, float>) {
    const Quad sums = add_quads(add_pairs(add_pairs(a, b), add_pairs(c, d)));
    Quad* to = reinterpret_cast<Quad*>(out);
    *to = kAdd ? *to + sums : sums;
  } else {
    const T sums[4] = {sum_lanes<T>(a), sum_lanes<T>(b), sum_lanes<T>(c), sum_lanes<T>(d)};
    for (int i = 0; i < 4; i++) out[i] = kAdd ? out[i] + sums[i] : sums[i];
  }
}

#if TT_VECTOR_BYTES == 64
// Adds neighbours of the 16-byte parts: of (a, b) gives [a0 + a1, a2 + a3, b0 + b1, b2 + b3].
TT_INLINE Vec<float> add_part_pairs(Vec<float> a, Vec<float> b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

// A 4 by 4 block of dot products over whole vectors: out[x, y] (+)= sum_n a[x, n] b[y, n].
template <bool kAdd>
TT_INLINE void dot_square(const float* a, int64_t ld_a, const float* b, int64_t ld_b, int64_t N,
                          float* out, int64_t ld_out) {
  constexpr int64_t W = kWidth<float>;
  Vec<float> sum[4][4];
  TT_UNROLL for (int i = 0; i < 16; i++) sum[i / 4][i % 4] = Vec<float>{};
#pragma GCC unroll 2
  for (int64_t n = 0; n < N; n += W) {
    Vec<float> b_n[4];
    TT_UNROLL for (int y = 0; y < 4; y++) b_n[y] = load(b + y * ld_b + n);
    TT_UNROLL for (int x = 0; x < 4; x++) {
      const Vec<float> a_n = load(a + x * ld_a + n);
      TT_UNROLL for (int y = 0; y < 4; y++) sum[x][y] += a_n * b_n[y];
    }
  }
  Vec<float> parts[4];  // of a row: four sums in each 16-byte part
  TT_UNROLL for (int x = 0; x < 4; x++) {
    parts[x] = add_pairs(add_pairs(sum[x][0], sum[x][1]), add_pairs(sum[x][2], sum[x][3]));
  }
  const Vec<float> sums =
      add_part_pairs(add_part_pairs(parts[0], parts[1]), add_part_pairs(parts[2], parts[3]));
  if (ld_out == 4) return store(out, kAdd ? load(out) + sums : sums);
  float rows[16];
  store(rows, sums);
  TT_UNROLL for (int x = 0; x < 4; x++) {
    Quad* to = reinterpret_cast<Quad*>(out + x * ld_out);
    const Quad of_row = *reinterpret_cast<const Quad*>(rows + 4 * x);
    *to = kAdd ? *to + of_row : of_row;
  }
}
#endif

// Rows of a tile of two vectors, and vectors of a tile of four rows, that fill the registers.
constexpr int kTallTile = TT_VECTOR_BYTES == 64 ? 8 : 4;
constexpr int kWideTile = TT_VECTOR_BYTES == 64 ? 4 : 3;

// How many of `count` vectors go in tiles of `kV`: one left over is as slow as two, so none is left.
TT_INLINE int64_t wide_end(int64_t count, int64_t kV) {
  const int64_t tiles = count / kV;
  return (count % kV == 1 && tiles > 0 ? tiles - 1 : tiles) * kV;
}

// One tile of C = A B: kX rows by kV vectors, held in registers over all K.
template <typename T, int kX, int kV>
TT_INLINE void product_tile(const T* a, int64_t ld_a, const T* b, int64_t ld_b, int64_t K, T* c,
                            int64_t ld_c) {
  constexpr int64_t W = kWidth<T>;
  Vec<T> sum[kX][kV];
  TT_UNROLL for (int i = 0; i < kX * kV; i++) sum[i / kV][i % kV] = Vec<T>{};
#pragma GCC unroll 4
  for (int64_t k = 0; k < K; k++) {
    Vec<T> b_k[kV];
    TT_UNROLL for (int v = 0; v < kV; v++) b_k[v] = load(b + k * ld_b + v * W);
    TT_UNROLL for (int x = 0; x < kX; x++) {
      const T a_xk = a[x * ld_a + k];
      TT_UNROLL for (int v = 0; v < kV; v++) sum[x][v] += a_xk * b_k[v];
    }
  }
  TT_UNROLL for (int x = 0; x < kX; x++) {
    TT_UNROLL for (int v = 0; v < kV; v++) store(c + x * ld_c + v * W, sum[x][v]);
  }
}

template <typename T, int kX>
TT_INLINE void product_rows(const T* a, int64_t ld_a, const T* b, int64_t ld_b, int64_t K,
                            int64_t N, T* c, int64_t ld_c) {
  constexpr int64_t W = kWidth<T>;
  constexpr int kV = kX == 6 ? 2 : kX == 4 ? kWideTile : 4;
  const int64_t wide = wide_end(N / W, kV) * W;
  int64_t n = 0;
  for (; n < wide; n += kV * W) product_tile<T, kX, kV>(a, ld_a, b + n, ld_b, K, c + n, ld_c);
  for (; n + 2 * W <= N; n += 2 * W) product_tile<T, kX, 2>(a, ld_a, b + n, ld_b, K, c + n, ld_c);
  for (; n + W <= N; n += W) product_tile<T, kX, 1>(a, ld_a, b + n, ld_b, K, c + n, ld_c);
  for (; n < N; n++) {
    TT_UNROLL for (int x = 0; x < kX; x++) {
      T sum = 0;
      for (int64_t k = 0; k < K; k++) sum += a[x * ld_a + k] * b[k * ld_b + n];
      c[x * ld_c + n] = sum;
    }
  }
}

// C [X, N] = A [X, K] B [K, N].
template <typename T>
TT_INLINE void product(const T* a, int64_t ld_a, const T* b, int64_t ld_b, int64_t X, int64_t K,
                       int64_t N, T* c, int64_t ld_c) {
  int64_t x = 0;
  if (kTallTile > 4 && N == 2 * kWidth<T>) {
    for (; x + kTallTile <= X; x += kTallTile) {
      product_tile<T, kTallTile, 2>(a + x * ld_a, ld_a, b, ld_b, K, c + x * ld_c, ld_c);
    }
  }
  if (TT_VECTOR_BYTES == 32) {
    for (; x + 6 <= X; x += 6) product_rows<T, 6>(a + x * ld_a, ld_a, b, ld_b, K, N, c + x * ld_c, ld_c);
  }
  for (; x + 4 <= X; x += 4) product_rows<T, 4>(a + x * ld_a, ld_a, b, ld_b, K, N, c + x * ld_c, ld_c);
  for (; x + 2 <= X; x += 2) product_rows<T, 2>(a + x * ld_a, ld_a, b, ld_b, K, N, c + x * ld_c, ld_c);
  for (; x < X; x++) product_rows<T, 1>(a + x * ld_a, ld_a, b, ld_b, K, N, c + x * ld_c, ld_c);
}

// kX by kY block of dot products over N: out[x, y] (+)= sum_n a[x, n] b[y, n].
template <typename T, int kX, int kY, bool kAdd>
TT_INLINE void dot_block(const T* a, int64_t ld_a, const T* b, int64_t ld_b, int64_t N, T* out,
                         int64_t ld_out) {
  constexpr int64_t W = kWidth<T>;
  Vec<T> sum[kX][kY];
  TT_UNROLL for (int i = 0; i < kX * kY; i++) sum[i / kY][i % kY] = Vec<T>{};
  int64_t n = 0;
#pragma GCC unroll 4
  for (; n + W <= N; n += W) {
    Vec<T> b_n[kY];
    TT_UNROLL for (int y = 0; y < kY; y++) b_n[y] = load(b + y * ld_b + n);
    TT_UNROLL for (int x = 0; x < kX; x++) {
      const Vec<T> a_n = load(a + x * ld_a + n);
      TT_UNROLL for (int y = 0; y < kY; y++) sum[x][y] += a_n * b_n[y];
    }
  }
  TT_UNROLL for (int x = 0; x < kX; x++) {
    T* to = out + x * ld_out;
    if constexpr (kY == 4) {
      store_sums<T, kAdd>(sum[x][0], sum[x][1], sum[x][2], sum[x][3], to);
    } else {
      TT_UNROLL for (int y = 0; y < kY; y++) {
        const T total = sum_lanes<T>(sum[x][y]);
        to[y] = kAdd ? to[y] + total : total;
      }
    }
    for (int y = 0; y < kY && n < N; y++) {
      for (int64_t i = n; i < N; i++) to[y] += a[x * ld_a + i] * b[y * ld_b + i];
    }
  }
}

template <typename T, int kY, bool kAdd>
TT_INLINE void dot_columns(const T* a, int64_t ld_a, const T* b, int64_t ld_b, int64_t X, int64_t N,
                           T* out, int64_t ld_out) {
  int64_t x = 0;
#if TT_VECTOR_BYTES == 64
  if constexpr (kY == 4 && std::is_same_v<T, float>) {
    for (; x + 4 <= X && N % kWidth<T> == 0; x += 4) {
      dot_square<kAdd>(a + x * ld_a, ld_a, b, ld_b, N, out + x * ld_out, ld_out);
    }
  }
#endif
  for (; x + 2 <= X; x += 2) {
    dot_block<T, 2, kY, kAdd>(a + x * ld_a, ld_a, b, ld_b, N, out + x * ld_out, ld_out);
  }
  if (x < X) dot_block<T, 1, kY, kAdd>(a + x * ld_a, ld_a, b, ld_b, N, out + x * ld_out, ld_out);
}

// out [X, Y] (+)= A [X, N] B [Y, N]^T. B, the larger, is read once.
template <typename T, bool kAdd>
TT_INLINE void product_transposed(const T* a, int64_t ld_a, const T* b, int64_t ld_b, int64_t X,
                                  int64_t Y, int64_t N, T* out, int64_t ld_out) {
  int64_t y = 0;
  for (; y + 4 <= Y; y += 4) {
    dot_columns<T, 4, kAdd>(a, ld_a, b + y * ld_b, ld_b, X, N, out + y, ld_out);
  }
  for (; y < Y; y++) {
    dot_columns<T, 1, kAdd>(a, ld_a, b + y * ld_b, ld_b, X, N, out + y, ld_out);
  }
}

// A sum of outer products: out[i, n] (+)= sum_t sum_k a_t[k * step_k + i * step_i] b_t[k, n].
template <typename T>
struct OuterTerm {
  const T* a;
  const T* b;
};

// What becomes of such a sum: out = sum, start + sum, or out += scale * (sum, or start + sum).
// `start` is laid out as `out`, and may be it.
template <typename T>
struct OuterTarget {
  T* out;
  const T* start;  // or null
  T scale;

  OuterTarget operator+(int64_t n) const { return {out + n, start ? start + n : nullptr, scale}; }
};

template <typename T, int kI, int kV, bool kStart, bool kStep>
TT_INLINE void outer_tile(const OuterTerm<T>* terms, int64_t num_terms, int64_t a_at, int64_t b_at,
                          int64_t step_k, int64_t step_i, int64_t ld_b, int64_t K,
                          const OuterTarget<T>& to, int64_t ld_out) {
  constexpr int64_t W = kWidth<T>;
  Vec<T> sum[kI][kV];
  TT_UNROLL for (int i = 0; i < kI * kV; i++) {
    sum[i / kV][i % kV] = kStart ? load(to.start + i / kV * ld_out + i % kV * W) : Vec<T>{};
  }
  for (int64_t t = 0; t < num_terms; t++) {
    const T* a = terms[t].a + a_at;
    const T* b = terms[t].b + b_at;
#pragma GCC unroll 4
    for (int64_t k = 0; k < K; k++) {
      Vec<T> b_k[kV];
      TT_UNROLL for (int v = 0; v < kV; v++) b_k[v] = load(b + k * ld_b + v * W);
      TT_UNROLL for (int i = 0; i < kI; i++) {
        const T a_ki = a[k * step_k + i * step_i];
        TT_UNROLL for (int v = 0; v < kV; v++) sum[i][v] += a_ki * b_k[v];
      }
    }
  }
  TT_UNROLL for (int i = 0; i < kI; i++) {
    TT_UNROLL for (int v = 0; v < kV; v++) {
      T* out = to.out + i * ld_out + v * W;
      store(out, kStep ? load(out) + to.scale * sum[i][v] : sum[i][v]);
    }
  }
}

template <typename T, int kI, bool kStart, bool kStep>
TT_INLINE void outer_rows(const OuterTerm<T>* terms, int64_t num_terms, int64_t a_at,
                          int64_t step_k, int64_t step_i, int64_t ld_b, int64_t K, int64_t N,
                          const OuterTarget<T>& to, int64_t ld_out) {
  constexpr int64_t W = kWidth<T>;
  constexpr int kV = kI == 4 ? kWideTile : 4;
  const int64_t wide = wide_end(N / W, kV) * W;
  int64_t n = 0;
  for (; n < wide; n += kV * W) {
    outer_tile<T, kI, kV, kStart, kStep>(terms, num_terms, a_at, n, step_k, step_i, ld_b, K, to + n,
                                         ld_out);
  }
  for (; n + 2 * W <= N; n += 2 * W) {
    outer_tile<T, kI, 2, kStart, kStep>(terms, num_terms, a_at, n, step_k, step_i, ld_b, K, to + n,
                                        ld_out);
  }
  for (; n + W <= N; n += W) {
    outer_tile<T, kI, 1, kStart, kStep>(terms, num_terms, a_at, n, step_k, step_i, ld_b, K, to + n,
                                        ld_out);
  }
  for (; n < N; n++) {
    TT_UNROLL for (int i = 0; i < kI; i++) {
      T sum = kStart ? to.start[i * ld_out + n] : T(0);
      for (int64_t t = 0; t < num_terms; t++) {
        for (int64_t k = 0; k < K; k++) {
          sum += terms[t].a[a_at + k * step_k + i * step_i] * terms[t].b[k * ld_b + n];
        }
      }
      T& out = to.out[i * ld_out + n];
      out = kStep ? out + to.scale * sum : sum;
    }
  }
}

template <typename T, bool kStart, bool kStep>
TT_INLINE void outer_products(const OuterTerm<T>* terms, int64_t num_terms, int64_t step_k,
                              int64_t step_i, int64_t ld_b, int64_t I, int64_t K, int64_t N,
                              const OuterTarget<T>& to, int64_t ld_out) {
  int64_t i = 0;
  if (kTallTile > 4 && N == 2 * kWidth<T>) {
    for (; i + kTallTile <= I; i += kTallTile) {
      outer_tile<T, kTallTile, 2, kStart, kStep>(terms, num_terms, i * step_i, 0, step_k, step_i,
                                                 ld_b, K, to + i * ld_out, ld_out);
    }
  }
  for (; i + 4 <= I; i += 4) {
    outer_rows<T, 4, kStart, kStep>(terms, num_terms, i * step_i, step_k, step_i, ld_b, K, N,
                                    to + i * ld_out, ld_out);
  }
  for (; i < I; i++) {
    outer_rows<T, 1, kStart, kStep>(terms, num_terms, i * step_i, step_k, step_i, ld_b, K, N,
                                    to + i * ld_out, ld_out);
  }
}

template <typename T, bool kAdd>
TT_INLINE void outer_product(const OuterTerm<T>* terms, int64_t num_terms, int64_t step_k,
                             int64_t step_i, int64_t ld_b, int64_t I, int64_t K, int64_t N, T* out,
                             int64_t ld_out) {
  outer_products<T, kAdd, false>(terms, num_terms, step_k, step_i, ld_b, I, K, N,
                                 {out, kAdd ? out : nullptr, T(1)}, ld_out);
}

// to[i] (+)= scale * from[i]
template <typename T, bool kAdd>
TT_INLINE void scaled(const T* from, T scale, int64_t n, T* to) {
  constexpr int64_t W = kWidth<T>;
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, kAdd ? load(to + i) + scale * load(from + i) : scale * load(from + i));
  for (; i < n; i++) to[i] = kAdd ? to[i] + scale * from[i] : scale * from[i];
}

}  // namespace torchrec_tt::TT_ISA
