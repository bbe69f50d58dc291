// Between storage (any dtype, any strides) and scratch (fp32 or fp64, dense, zero-padded).
#pragma once

#include "attention_params.h"
#include "simd.h"
#include "tile_size.h"

namespace mha_ext::cpu {
namespace {

template <typename T>
constexpr Dtype kDtypeOf = sizeof(T) == 8 ? Dtype::f64 : Dtype::f32;

template <typename To, typename From>
inline To bits(From x) {
  To y;
  std::memcpy(&y, &x, sizeof(y));
  return y;
}

inline float bf16_to_float(uint16_t x) { return bits<float>(static_cast<uint32_t>(x) << 16); }

// Round to nearest even; NaN keeps its sign and becomes quiet.
inline uint16_t float_to_bf16(float x) {
  const uint32_t u = bits<uint32_t>(x);
  if (x != x) return static_cast<uint16_t>((u >> 16) | 0x40);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// The exponent is rebased by a multiplication with 2^112, which also normalises subnormals.
inline float half_to_float(uint16_t x) {
  const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fff) << 13;
  uint32_t u = bits<uint32_t>(bits<float>(magnitude) * 0x1p112f);
  if ((x & 0x7c00) == 0x7c00) u = magnitude | 0x7f800000;
  return bits<float>(u | static_cast<uint32_t>(x & 0x8000) << 16);
}

inline uint16_t float_to_half(float x) {
  const uint32_t u = bits<uint32_t>(x);
  const uint32_t magnitude = u & 0x7fffffff;
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000);
  if (magnitude > 0x7f800000) return sign | 0x7e00;   // NaN
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and above round to infinity
  if (magnitude < 0x38800000) {                       // below 2^-14: fixed point of 2^-24, rounded by the addition
    return sign | static_cast<uint16_t>(bits<uint32_t>(bits<float>(magnitude) + 0.5f) - 0x3f000000);
  }
  return sign | static_cast<uint16_t>((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13);
}

template <typename T, typename Source, typename Read>
inline void load_elements(const void* data, int64_t offset, int64_t stride, int64_t n, T factor, T* dst, Read read) {
  const Source* src = static_cast<const Source*>(data) + offset;
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) dst[i] = static_cast<T>(read(src[i])) * factor;
  } else {
    for (int64_t i = 0; i < n; ++i) dst[i] = static_cast<T>(read(src[i * stride])) * factor;
  }
}

// Where a row of the view can be read as it is, as vectors too; null if that needs a copy.
template <typename T>
inline const T* row_in_place(const View& v, int64_t b, int64_t h, int64_t row, int64_t column) {
  const bool fits = v.dtype == kDtypeOf<T> && v.stride[3] == 1;
  return fits ? static_cast<const T*>(v.data) + v.offset(b, h, row, column) : nullptr;
}

// A finite double stays finite as a float: a bias of finfo(float64).min is a low score, not a mask.
template <typename T>
inline double narrow(double x) {
  constexpr double most = std::numeric_limits<T>::max();
  if (x > most && x < kInfinity<double>) return most;
  return x < -most && x > -kInfinity<double> ? -most : x;
}

// dst[i] = view[b, h, row, column + i] * factor, i < n
template <typename T>
inline void load_row(const View& v, int64_t b, int64_t h, int64_t row, int64_t column, int64_t n, T factor, T* dst) {
  const int64_t offset = v.offset(b, h, row, column);
  const auto same = [](auto x) { return x; };
  switch (v.dtype) {
    case Dtype::f32: return load_elements<T, float>(v.data, offset, v.stride[3], n, factor, dst, same);
    case Dtype::f64: return load_elements<T, double>(v.data, offset, v.stride[3], n, factor, dst, narrow<T>);
    case Dtype::bf16: return load_elements<T, uint16_t>(v.data, offset, v.stride[3], n, factor, dst, bf16_to_float);
    case Dtype::f16: return load_elements<T, uint16_t>(v.data, offset, v.stride[3], n, factor, dst, half_to_float);
    case Dtype::boolean: return;
  }
}

template <typename T, typename Target, typename Write>
inline void store_elements(void* data, int64_t offset, int64_t stride, int64_t n, T factor, const T* src, Write write) {
  Target* dst = static_cast<Target*>(data) + offset;
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) dst[i] = write(src[i] * factor);
  } else {
    for (int64_t i = 0; i < n; ++i) dst[i * stride] = write(src[i] * factor);
  }
}

// view[b, h, row, column + i] = src[i] * factor, i < n
template <typename T>
inline void store_row(const View& v, int64_t b, int64_t h, int64_t row, int64_t column, int64_t n, T factor,
                      const T* src) {
  const int64_t offset = v.offset(b, h, row, column);
  switch (v.dtype) {
    case Dtype::f32:
      return store_elements<T, float>(v.data, offset, v.stride[3], n, factor, src,
                                      [](T x) { return static_cast<float>(x); });
    case Dtype::f64:
      return store_elements<T, double>(v.data, offset, v.stride[3], n, factor, src,
                                       [](T x) { return static_cast<double>(x); });
    case Dtype::bf16:
      return store_elements<T, uint16_t>(v.data, offset, v.stride[3], n, factor, src,
                                         [](T x) { return float_to_bf16(static_cast<float>(x)); });
    case Dtype::f16:
      return store_elements<T, uint16_t>(v.data, offset, v.stride[3], n, factor, src,
                                         [](T x) { return float_to_half(static_cast<float>(x)); });
    case Dtype::boolean: return;
  }
}

// view[b, h, row, column + i] += src[i] * factor, i < n, of an accumulator
template <typename T>
inline void add_row(const View& v, int64_t b, int64_t h, int64_t row, int64_t column, int64_t n, T factor,
                    const T* src) {
  T* dst = static_cast<T*>(v.data) + v.offset(b, h, row, column);
  if (v.stride[3] == 1) {
    for (int64_t i = 0; i < n; ++i) dst[i] += src[i] * factor;
  } else {
    for (int64_t i = 0; i < n; ++i) dst[i * v.stride[3]] += src[i] * factor;
  }
}

template <typename T>
inline void fill(T* p, int64_t n, T x) {
  for (int64_t i = 0; i < n; ++i) p[i] = x;
}

// dst (padded_rows x padded(columns)) = view[b, h, row .., :] * factor, zeros in the padding
template <typename T>
void load_rows(const View& v, int64_t b, int64_t h, int64_t row, int64_t rows, int64_t columns, T factor,
               int64_t padded_rows, T* dst) {
  const int64_t ld = padded(columns);
  for (int64_t r = 0; r < rows; ++r) {
    load_row(v, b, h, row + r, 0, columns, factor, dst + r * ld);
    fill(dst + r * ld + columns, ld - columns, T(0));
  }
  fill(dst + rows * ld, (padded_rows - rows) * ld, T(0));
}

// A NaN in some lane if an Inf or NaN is among the n elements (n a multiple of kLanes): x * 0 is NaN for those and 0
// for the rest.
template <typename T>
inline Vec<T> zero_if_finite(const T* p, int64_t n) {
  Vec<T> sum{};
  for (int64_t i = 0; i < n; i += kWidth<T>) sum += load(p + i) * T(0);
  return sum;
}

template <typename T>
bool all_finite(const T* p, int64_t n) {
  return horizontal_sum<T>(zero_if_finite(p, n)) == T(0);
}

// One 32-byte row of a square block, whatever the instruction set: 8 floats or 4 doubles.
template <typename T>
struct BlockRow {
  typedef T type __attribute__((vector_size(32), aligned(sizeof(T)), may_alias));
};

inline void transpose_block(const float* src, int64_t ld_src, float* dst, int64_t ld_dst) {
  typedef BlockRow<float>::type Row;
  Row r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = *reinterpret_cast<const Row*>(src + i * ld_src);
  for (int i = 0; i < 8; i += 2) {
    t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      r[i + j] = __builtin_shufflevector(t[i + j], t[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      r[i + j + 2] = __builtin_shufflevector(t[i + j], t[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<Row*>(dst + i * ld_dst) = __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    *reinterpret_cast<Row*>(dst + (i + 4) * ld_dst) =
        __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

inline void transpose_block(const double* src, int64_t ld_src, double* dst, int64_t ld_dst) {
  typedef BlockRow<double>::type Row;
  Row r[4], t[4];
  for (int i = 0; i < 4; ++i) r[i] = *reinterpret_cast<const Row*>(src + i * ld_src);
  for (int i = 0; i < 4; i += 2) {
    t[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 4, 2, 6);
    t[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 1, 5, 3, 7);
  }
  for (int i = 0; i < 2; ++i) {
    *reinterpret_cast<Row*>(dst + i * ld_dst) = __builtin_shufflevector(t[i], t[i + 2], 0, 1, 4, 5);
    *reinterpret_cast<Row*>(dst + (i + 2) * ld_dst) = __builtin_shufflevector(t[i], t[i + 2], 2, 3, 6, 7);
  }
}

// dst (columns x rows) = src (rows x columns)^T; both sizes multiples of kLanes
template <typename T>
void transpose(const T* src, int64_t ld_src, int64_t rows, int64_t columns, T* dst, int64_t ld_dst) {
  constexpr int64_t step = 32 / sizeof(T);
  for (int64_t c = 0; c < columns; c += step) {
    for (int64_t r = 0; r < rows; r += step)
      transpose_block(src + r * ld_src + c, ld_src, dst + c * ld_dst + r, ld_dst);
  }
}

}  // namespace
}  // namespace mha_ext::cpu
