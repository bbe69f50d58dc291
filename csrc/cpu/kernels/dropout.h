// Dropout decisions from a counter: a hash of (seed, batch, head, query, key), so the backward draws them again and
// they do not depend on threads or tiles. The mixer is the 32-bit finaliser with multipliers 0x7feb352d and 0x846ca68b
// (C. Wellons, "hash-prospector", lowbias32); a second 32-bit row key enters between its two multiplications.
// composite/ has the same function in ATen.
#pragma once

#include "attention_params.h"
#include "simd.h"

namespace mha_ext::cpu {
namespace {

inline uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// The two keys of one row of weights.
struct RowKeys {
  uint32_t first, second;
};

inline RowKeys row_keys(const Dropout& d, int64_t batch, int64_t head, int64_t query) {
  const uint32_t b = static_cast<uint32_t>(batch), h = static_cast<uint32_t>(head), q = static_cast<uint32_t>(query);
  return {mix(d.seed_low ^ mix(b ^ mix(h ^ mix(q + 0x9e3779b9u)))),
          mix(d.seed_high ^ mix((b + 0x85ebca6bu) ^ mix(h ^ mix(q + 0xc2b2ae35u))))};
}

inline bool keeps(const Dropout& d, RowKeys keys, int64_t key) {
  uint32_t x = static_cast<uint32_t>(key) * 0x9e3779b9u + keys.first;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= keys.second;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return static_cast<int32_t>(x >> 1) >= d.threshold;
}

// weights[j] <- 0 where (row, key + j) is dropped, j < n. The scale 1 / (1 - p) is left to the caller.
template <typename T>
void drop_row(const Dropout& d, RowKeys keys, int64_t key, int64_t n, T* weights) {
  if (d.drops_all) {
    for (int64_t j = 0; j < n; ++j) weights[j] = T(0);
    return;
  }
  for (int64_t j = 0; j < n; ++j) weights[j] = keeps(d, keys, key + j) ? weights[j] : T(0);
}

// Of one row and n keys in the lanes: factor[j] = 1 / (1 - p) or 0.
template <typename T>
void keep_factors(const Dropout& d, RowKeys keys, int64_t key, int64_t n, T* factor) {
  const T scale = static_cast<T>(d.keep_scale);
  for (int64_t j = 0; j < n; ++j) factor[j] = keeps(d, keys, key + j) ? scale : T(0);
}

// The same for one key and n rows in the lanes: factor[i] = 1 / (1 - p) or 0.
template <typename T>
void keep_factors(const Dropout& d, const uint32_t* first, const uint32_t* second, int64_t key, int64_t n, T* factor) {
  const T scale = static_cast<T>(d.keep_scale);
  for (int64_t i = 0; i < n; ++i) factor[i] = keeps(d, {first[i], second[i]}, key) ? scale : T(0);
}

}  // namespace
}  // namespace mha_ext::cpu
