// The most that multiplications and additions can reach on this machine: nothing but independent ones, in registers.
#pragma once

#include "gemm.h"

namespace mha_ext::cpu {
namespace {

template <typename T>
constexpr int64_t kPeakOperations = 2 * (2 * kRegisterRows) * kWidth<T>;

// iterations times kPeakOperations<T> floating-point operations. Returns their sum, so that none can be left out.
template <typename T>
double multiply_add(int64_t iterations) {
  Vec<T> sums[2 * kRegisterRows];
#pragma GCC unroll 32
  for (int i = 0; i < 2 * kRegisterRows; ++i) sums[i] = broadcast(static_cast<T>(i));
  const Vec<T> x = broadcast(static_cast<T>(iterations > 0 ? 0.5 : 0.25));  // not known when this is compiled
  for (int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 32
    for (int i = 0; i < 2 * kRegisterRows; ++i) sums[i] = sums[i] * x + x;
  }
  Vec<T> total{};
#pragma GCC unroll 32
  for (int i = 0; i < 2 * kRegisterRows; ++i) total += sums[i];
  return horizontal_sum<T>(total);
}

}  // namespace
}  // namespace mha_ext::cpu
