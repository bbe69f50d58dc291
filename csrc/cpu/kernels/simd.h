// Portable vectors: GCC/Clang vector extensions as wide as the instruction set this file is compiled for. No torch
// header (at::vec would pull inline functions compiled for the wrong machine into the library).
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

namespace mha_ext::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias));
};
template <typename T>
using Vec = typename VectorOf<T>::type;

template <typename T>
constexpr int64_t kWidth = kVectorBytes / static_cast<int64_t>(sizeof(T));

// Signed integers with as many lanes as Vec<T>: what comparisons give.
template <typename T>
using IntOf = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;

template <typename V, typename T>
inline V load_as(const T* p) {
  return *reinterpret_cast<const V*>(p);
}

template <typename V, typename T>
inline void store_as(T* p, V v) {
  *reinterpret_cast<V*>(p) = v;
}

template <typename T>
inline Vec<T> load(const T* p) {
  return load_as<Vec<T>>(p);
}

template <typename T>
inline void store(T* p, Vec<T> v) {
  store_as<Vec<T>>(p, v);
}

template <typename T>
inline Vec<T> broadcast(T x) {
  return x - Vec<T>{};
}

// where(a > b, a, b): with a NaN the result is b.
template <typename T>
inline Vec<T> max(Vec<T> a, Vec<T> b) {
  return a > b ? a : b;
}

// Lane i of the result is v[i ^ Step].
template <int Step, typename T, size_t... Lane>
inline Vec<T> swap_lanes(Vec<T> v, std::index_sequence<Lane...>) {
  return __builtin_shufflevector(v, v, (Lane ^ Step)...);
}

// combine(v[0], v[1], ...), in a tree.
template <typename T, int Step = 1, typename Combine>
inline T reduce_lanes(Vec<T> v, const Combine& combine) {
  if constexpr (Step == kWidth<T>) {
    return v[0];
  } else {
    return reduce_lanes<T, 2 * Step>(combine(v, swap_lanes<Step, T>(v, std::make_index_sequence<kWidth<T>>())),
                                     combine);
  }
}

template <typename T>
inline T horizontal_max(Vec<T> v) {
  return reduce_lanes<T>(v, [](Vec<T> a, Vec<T> b) { return max<T>(a, b); });
}

template <typename T>
inline T horizontal_sum(Vec<T> v) {
  return reduce_lanes<T>(v, [](Vec<T> a, Vec<T> b) { return a + b; });
}

template <typename T>
constexpr T kLog2e = static_cast<T>(1.4426950408889634073599246810019);
template <typename T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

// 2^x = power (1 + slope fraction): power = 2^n, n = round(x).
template <typename T>
struct Exp2Parts {
  Vec<T> power, slope, fraction;
};

// For x between the exponents of normal numbers. fp32: degree-5 minimax polynomial in x - n, relative error 9.1e-8.
inline Exp2Parts<float> exp2_parts(Vec<float> x) {
  const Vec<float> shift = broadcast(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer kept in the low bits
  const Vec<float> shifted = x + shift;
  const Vec<float> f = x - (shifted - shift);
  Vec<float> p = f * 0.001326472731307149f + 0.009671512991189957f;
  p = p * f + 0.05550733581185341f;
  p = p * f + 0.24022242426872253f;
  p = p * f + 0.6931470036506653f;
  typedef int32_t Int __attribute__((vector_size(kVectorBytes), may_alias));
  const Int n = reinterpret_cast<Int>(shifted) << 23;  // the magic constant's own low bits are zero
  return {reinterpret_cast<Vec<float>>(n + (127 << 23)), p, f};
}

// fp64: Taylor polynomial of degree 13 in (x - n) ln 2, relative error 4e-18 before rounding.
inline Exp2Parts<double> exp2_parts(Vec<double> x) {
  const Vec<double> shift = broadcast(6755399441055744.);  // 1.5 * 2^52
  const Vec<double> shifted = x + shift;
  const Vec<double> f = (x - (shifted - shift)) * 0.69314718055994530941723212145818;
  Vec<double> p = broadcast(1. / 6227020800.);
  const double factorials[] = {479001600., 39916800., 3628800., 362880., 40320., 5040., 720., 120., 24., 6., 2., 1.};
  for (double k : factorials) p = p * f + 1. / k;
  typedef int64_t Int __attribute__((vector_size(kVectorBytes), may_alias));
  const Int n = reinterpret_cast<Int>(shifted) << 52;
  return {reinterpret_cast<Vec<double>>(n + (int64_t{1023} << 52)), p, f};
}

// 2^x. Below the smallest normal number the result is 0; above the largest it is clamped; NaN stays NaN.
template <typename V>
inline V exp2(V x) {
  using T = std::remove_reference_t<decltype(x[0])>;
  constexpr T most = std::numeric_limits<T>::max_exponent - 1, least = std::numeric_limits<T>::min_exponent - 1;
  const V clamped = x > most ? broadcast(most) : x;
  const Exp2Parts<T> e = exp2_parts(clamped);
  return clamped < least ? V{} : (e.slope * e.fraction + T(1)) * e.power;
}

template <typename T>
inline T exp2_scalar(T x) {
  return exp2(broadcast(x))[0];
}

}  // namespace
}  // namespace mha_ext::cpu
