// Scores that cannot grow beyond c: S <- c tanh(S / c) (Gemma Team 2024, "Gemma 2", section 2).
#pragma once

#include "simd.h"

namespace mha_ext::cpu {
namespace {

// tanh|x| = -t / (2 + t), t = e^(-2|x|) - 1. With 2^y = power (1 + slope f) no digits cancel where x is small.
template <typename T>
inline Vec<T> tanh(Vec<T> x) {
  const Vec<T> magnitude = x < T(0) ? -x : x;
  const Vec<T> y = magnitude * (-2 * kLog2e<T>);
  const Exp2Parts<T> e = exp2_parts(y < T(-126) ? broadcast(T(-126)) : y);
  const Vec<T> t = e.slope * e.fraction * e.power + (e.power - T(1));
  const Vec<T> result = -t / (t + T(2));
  return x < T(0) ? -result : result;
}

// s_j <- c tanh(s_j / c) and, unless null, slope_j <- 1 - tanh^2(s_j / c), the derivative. n is a multiple of kLanes.
template <typename T>
void cap_row(T c, int64_t n, T* s, T* slope = nullptr) {
  const T inverse = T(1) / c;
  for (int64_t j = 0; j < n; j += kWidth<T>) {
    const Vec<T> x = tanh<T>(load(s + j) * inverse);
    store(s + j, x * c);
    if (slope) store(slope + j, T(1) - x * x);
  }
}

// dS_j <- dS_j slope_j; where nothing flows nothing does, whatever the slope.
template <typename T>
void multiply_by_slope(int64_t n, const T* slope, T* grad) {
  for (int64_t j = 0; j < n; j += kWidth<T>) {
    const Vec<T> g = load(grad + j);
    store(grad + j, g == T(0) ? Vec<T>{} : g * load(slope + j));
  }
}

}  // namespace
}  // namespace mha_ext::cpu
