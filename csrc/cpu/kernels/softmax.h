// Online softmax over score tiles (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022): a row keeps its
// running maximum m and sum l, and what was summed under an older maximum is rescaled by alpha.
#pragma once

#include "simd.h"

#include <cmath>

namespace mha_ext::cpu {
namespace {

template <typename T>
struct SoftmaxRow {
  T maximum = -kInfinity<T>;  // m
  T sum = T(0);               // l
};

// m <- max(m, max_j s_j); s_j <- e^(s_j - m); l <- l alpha + sum_j s_j. Returns alpha. n is a multiple of kLanes,
// padding holds -inf. While a row has seen only hidden keys m is -inf and every s_j becomes 0.
template <typename T>
inline T softmax_step(SoftmaxRow<T>& row, int64_t n, T* s) {
  Vec<T> largest = load(s);
  for (int64_t j = kWidth<T>; j < n; j += kWidth<T>) largest = max<T>(load(s + j), largest);
  const T before = row.maximum;
  const T tile_maximum = horizontal_max<T>(largest);
  row.maximum = tile_maximum > before ? tile_maximum : before;
  const T m = row.maximum == -kInfinity<T> ? T(0) : row.maximum;
  Vec<T> sum{};
  for (int64_t j = 0; j < n; j += kWidth<T>) {
    const Vec<T> e = exp2((load(s + j) - m) * kLog2e<T>);
    store(s + j, e);
    sum += e;
  }
  const T alpha = row.maximum == before ? T(1) : exp2_scalar<T>((before - m) * kLog2e<T>);
  row.sum = row.sum * alpha + horizontal_sum<T>(sum);
  return alpha;
}

template <typename T>
inline T logsumexp(const SoftmaxRow<T>& row) {
  return row.sum == T(0) ? -kInfinity<T> : row.maximum + std::log(row.sum);
}

}  // namespace
}  // namespace mha_ext::cpu
