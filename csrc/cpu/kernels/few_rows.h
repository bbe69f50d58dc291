// Products of a few rows (short queries, decoding) with keys and values that are read once: bound by memory, so both
// are read as they lie and nothing is packed.
#pragma once

#include "gemm.h"

#include <utility>

namespace mha_ext::cpu {
namespace {

// Forward and backward with so many rows or fewer read keys and values in place: then the products below take no longer
// than packing and the tile product do. Measured for 16 to 64 rows against 16 to 1024 keys, see CONTRIBUTING.md.
constexpr int64_t kFewRows = kVectorBytes == 64 ? 64 : 24;

// Lane i of the result is a[i] + a[i ^ Step] where i & Step is 0, b[i] + b[i ^ Step] elsewhere.
template <int Step, typename T, size_t... Lane>
inline Vec<T> merge_lanes(Vec<T> a, Vec<T> b, std::index_sequence<Lane...>) {
  constexpr int w = sizeof...(Lane);
  const Vec<T> here = __builtin_shufflevector(a, b, (Lane & Step ? w + Lane : Lane)...);
  const Vec<T> there = __builtin_shufflevector(a, b, ((Lane & Step ? w + Lane : Lane) ^ Step)...);
  return here + there;
}

// Lane i of the result is the sum of the lanes of sums[i]; destroys sums.
template <typename T, int Step = 1>
inline Vec<T> sum_lanes(Vec<T>* sums) {
  constexpr int w = kWidth<T>;
  if constexpr (Step == w) {
    return sums[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < w / Step / 2; ++i) {
      sums[i] = merge_lanes<Step, T>(sums[2 * i], sums[2 * i + 1], std::make_index_sequence<w>());
    }
    return sum_lanes<T, 2 * Step>(sums);
  }
}

// Rows of a matrix are on their way into L2 by the time they are read: some 8 KB ahead is about as far as memory is
// slow.
template <typename T>
inline int64_t rows_ahead(int64_t columns) {
  return std::max<int64_t>(2, 8192 / (columns * static_cast<int64_t>(sizeof(T))));
}

template <typename T>
inline void prefetch(const T* p) {
  __builtin_prefetch(p, 0, 2);
}

// For Rows rows of A: c[r, 0:width] = A B^T for width rows of B, each read once and in the order in which they lie,
// which is what memory is fastest at. k a multiple of kLanes; rows of B beyond `last` are read as the last one.
template <int Rows, typename T>
inline void dot_rows(int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, int64_t last, T* c, int64_t ldc) {
  constexpr int w = kWidth<T>;
  constexpr int step = std::min(w, kVectorBytes == 64 ? 4 : 2);  // rows of B at once, as registers allow
  const int64_t ahead = rows_ahead<T>(k) * ldb;
  Vec<T> sums[Rows][w];
#pragma GCC unroll 8
  for (int j = 0; j < w; j += step) {
    const T* rows[step];
#pragma GCC unroll 4
    for (int x = 0; x < step; ++x) rows[x] = b + std::min<int64_t>(j + x, last) * ldb;
    Vec<T> sum[Rows][step] = {};
    for (int64_t i = 0; i < k; i += w) {
#pragma GCC unroll 4
      for (int x = 0; x < step; ++x) {
        const Vec<T> y = load(rows[x] + i);
        prefetch(rows[x] + i + ahead);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) sum[r][x] += load(a + r * lda + i) * y;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int x = 0; x < step; ++x) sums[r][j + x] = sum[r][x];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) store(c + r * ldc, sum_lanes<T>(sums[r]));
}

// C (m x n) = A (m x k) B (n x k)^T; k a multiple of kLanes. Writes padded(n) columns of C: those beyond n repeat the
// last.
template <typename T>
void few_rows_matmul_transposed(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
                                int64_t ldc) {
  for (int64_t j = 0; j < padded(n); j += kWidth<T>) {
    const int64_t row = std::min(j, n - 1);
    const T* rows = b + row * ldb;
    int64_t i = 0;
    for (; i + 4 <= m; i += 4) dot_rows<4>(k, a + i * lda, lda, rows, ldb, n - 1 - row, c + i * ldc + j, ldc);
    for (; i + 2 <= m; i += 2) dot_rows<2>(k, a + i * lda, lda, rows, ldb, n - 1 - row, c + i * ldc + j, ldc);
    for (; i < m; ++i) dot_rows<1>(k, a + i * lda, lda, rows, ldb, n - 1 - row, c + i * ldc + j, ldc);
  }
}

// C (m x n) += A (m x Depth) B (Depth x n), n a multiple of kLanes
template <int Depth, typename T>
inline void add_rows(int64_t m, int64_t n, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc) {
  const int64_t ahead = rows_ahead<T>(n) * ldb;
  for (int64_t j = 0; j < n; j += kWidth<T>) {
    Vec<T> row[Depth];
#pragma GCC unroll 8
    for (int i = 0; i < Depth; ++i) {
      row[i] = load(b + i * ldb + j);
      prefetch(b + i * ldb + j + ahead);
    }
    for (int64_t r = 0; r < m; ++r) {
      Vec<T> sum = load(c + r * ldc + j);
#pragma GCC unroll 8
      for (int i = 0; i < Depth; ++i) sum += a[r * lda + i] * row[i];
      store(c + r * ldc + j, sum);
    }
  }
}

// C (m x n) (+)= A (m x k) B (k x n), n a multiple of kLanes
template <typename T>
void few_rows_matmul(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
                     int64_t ldc, bool accumulate) {
  for (int64_t r = 0; r < m && !accumulate; ++r) std::memset(c + r * ldc, 0, n * sizeof(T));
  int64_t i = 0;
  for (; i + 8 <= k; i += 8) add_rows<8>(m, n, a + i, lda, b + i * ldb, ldb, c, ldc);
  for (; i < k; ++i) add_rows<1>(m, n, a + i, lda, b + i * ldb, ldb, c, ldc);
}

}  // namespace
}  // namespace mha_ext::cpu
