// The tile product C (+)= A B on dense row-major scratch. fp32 goes to oneDNN's brgemm where it runs (it is at the
// machine's peak); fp64, the baseline instruction set and other machines use the register-tiled kernel below.
#pragma once

#include "simd.h"
#include "tile_size.h"

namespace mha_ext::cpu {

// Implemented in cpu/brgemm.cpp, outside the files compiled per instruction set.
bool brgemm_available();
void brgemm_f32(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                int64_t ldc, bool accumulate);

namespace {

#if defined(__AVX512F__)
constexpr int kRegisterRows = 12;  // 12 x 2 accumulators of 32 registers
#elif defined(__AVX__)
constexpr int kRegisterRows = 6;  // 6 x 2 accumulators, 2 of B and 1 of A: 15 of 16 registers
#else
constexpr int kRegisterRows = 4;
#endif

// How element (row, i) of A is found: i * lda + row where A is stored transposed.
enum class Storage { plain, transposed };

template <Storage A>
constexpr int64_t place(int64_t row, int64_t i, int64_t lda) {
  return A == Storage::plain ? row * lda + i : i * lda + row;
}

// C[0:Rows, 0:Vectors * width] (+)= A[0:Rows, 0:k] B[0:k, ...], accumulated in registers in ascending k; V: vectors of
// another width than the instruction set's.
template <int Rows, int Vectors, Storage A, typename T, typename V = Vec<T>>
inline void register_tile(int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
                          bool accumulate) {
  constexpr int64_t width = sizeof(V) / sizeof(T);
  V sum[Rows][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sum[r][v] = accumulate ? load_as<V>(c + r * ldc + v * width) : V{};
  }
  for (int64_t i = 0; i < k; ++i) {
    V row[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) row[v] = load_as<V>(b + i * ldb + v * width);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[r][v] += a[place<A>(r, i, lda)] * row[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store_as<V>(c + r * ldc + v * width, sum[r][v]);
  }
}

// One column strip of Vectors vectors: full register tiles, then single rows.
template <int Vectors, Storage A, typename T>
void column_strip(int64_t m, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
                  bool accumulate) {
  int64_t r = 0;
  const auto tile = [&]<int Rows>(std::integral_constant<int, Rows>) {
    for (; r + Rows <= m; r += Rows) {
      register_tile<Rows, Vectors, A>(k, a + place<A>(r, 0, lda), lda, b, ldb, c + r * ldc, ldc, accumulate);
    }
  };
  tile(std::integral_constant<int, kRegisterRows>());
  tile(std::integral_constant<int, 4>());
  tile(std::integral_constant<int, 1>());
}

// C (m x n) (+)= A (m x k) B (k x n), n a multiple of kLanes
template <typename T, Storage A = Storage::plain>
void register_tiled_matmul(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
                           int64_t ldc, bool accumulate) {
  constexpr int64_t w = kWidth<T>;
  int64_t j = 0;
  for (; j + 2 * w <= n; j += 2 * w) column_strip<2, A>(m, k, a, lda, b + j, ldb, c + j, ldc, accumulate);
  for (; j < n; j += w) column_strip<1, A>(m, k, a, lda, b + j, ldb, c + j, ldc, accumulate);
}

template <typename T>
void matmul(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
            bool accumulate) {
#if defined(__AVX2__)
  if constexpr (sizeof(T) == 4) {
    if (brgemm_available()) return brgemm_f32(m, n, k, a, lda, b, ldb, c, ldc, accumulate);
  }
#endif
  register_tiled_matmul(m, n, k, a, lda, b, ldb, c, ldc, accumulate);
}

// The same where zeros of A stand for hidden pairs and B holds an Inf or NaN: 0 * NaN must not reach C. Slow, and only
// run for tiles that are partly hidden and not finite.
template <typename T, Storage A = Storage::plain>
void matmul_skipping_zeros_of_a(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
                                int64_t ldc, bool accumulate) {
  for (int64_t i = 0; i < m; ++i) {
    T* row = c + i * ldc;
    if (!accumulate) std::memset(row, 0, n * sizeof(T));
    for (int64_t j = 0; j < k; ++j) {
      const T weight = a[place<A>(i, j, lda)];
      if (weight == T(0)) continue;
      for (int64_t x = 0; x < n; ++x) row[x] += weight * b[j * ldb + x];
    }
  }
}

// The mirror image: zeros of B stand for hidden pairs and A holds an Inf or NaN.
template <typename T>
void matmul_skipping_zeros_of_b(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
                                int64_t ldc, bool accumulate) {
  for (int64_t i = 0; i < m; ++i) {
    T* row = c + i * ldc;
    if (!accumulate) std::memset(row, 0, n * sizeof(T));
    for (int64_t j = 0; j < k; ++j) {
      const T x = a[i * lda + j];
      for (int64_t l = 0; l < n; ++l) row[l] += b[j * ldb + l] == T(0) ? T(0) : x * b[j * ldb + l];
    }
  }
}

}  // namespace
}  // namespace mha_ext::cpu
