// Keys and values of one head, block by block, as the forward's products want them: packed once where many rows share
// them, else read as they lie.
#pragma once

#include "convert.h"
#include "workspace.h"

#include <algorithm>

namespace mha_ext::cpu {
namespace {

// A dense matrix: row r begins at data + r * ld.
template <typename T>
struct Matrix {
  const T* data;
  int64_t ld;
};

// columns a multiple of kLanes
template <typename T>
bool rows_are_finite(const Matrix<T>& m, int64_t rows, int64_t columns) {
  Vec<T> sum{};
  for (int64_t r = 0; r < rows; ++r) sum += zero_if_finite(m.data + r * m.ld, columns);
  return horizontal_sum<T>(sum) == T(0);
}

template <typename T>
class KeyBlocks {
 public:
  int64_t size, count;         // keys of a block (padded), blocks of a head
  int64_t depth, value_depth;  // padded head sizes

  KeyBlocks(const AttentionParams& p, Workspace& w) : p_(p), packs_(!p.few_rows) {
    size = padded(std::min(p.tile.forward_keys, p.kv_len));
    count = p.forward_key_blocks();
    depth = padded(p.head_dim);
    value_depth = padded(p.value_dim);
    // K^T (count, D, size) and V (count, size, Dv), or room for one block of either
    keys_in_place_ = !packs_ && depth == p.head_dim && row_in_place<T>(p.key, 0, 0, 0, 0);
    values_in_place_ = !packs_ && value_depth == p.value_dim && row_in_place<T>(p.value, 0, 0, 0, 0);
    const int64_t blocks = packs_ ? count : 1;
    keys_ = keys_in_place_ ? nullptr : w.take<T>(blocks * depth * size);
    values_ = values_in_place_ ? nullptr : w.take<T>(blocks * size * value_depth);
    rows_ = packs_ ? w.take<T>(size * depth) : nullptr;
    packed_ = w.take<uint8_t>(count);
    finite_ = w.take<uint8_t>(count);
  }

  void select(int64_t batch, int64_t kv_head) {
    if (batch == batch_ && kv_head == kv_head_) return;
    batch_ = batch;
    kv_head_ = kv_head;
    std::memset(packed_, 0, count);
  }

  int64_t keys_of(int64_t block) const { return std::min(size, p_.kv_len - block * size); }

  // Packed: K^T (D, size). Else K (keys, D), valid until the next call.
  Matrix<T> keys(int64_t block) {
    if (packs_) {
      pack(block);
      return {keys_ + block * depth * size, size};
    }
    return keys_in_place_ ? in_place(p_.key, block) : copied(p_.key, block, p_.head_dim, keys_);
  }

  // V (keys, Dv); not packed: valid until the next call.
  Matrix<T> values(int64_t block) {
    if (packs_) {
      pack(block);
      return {values_ + block * size * value_depth, value_depth};
    }
    return values_in_place_ ? in_place(p_.value, block) : copied(p_.value, block, p_.value_dim, values_);
  }

  // Whether no Inf or NaN is among the values of a block.
  bool values_are_finite(int64_t block, const Matrix<T>& values) const {
    return packs_ ? finite_[block] : rows_are_finite(values, keys_of(block), value_depth);
  }

 private:
  void pack(int64_t block) {
    if (packed_[block]) return;
    load_rows(p_.key, batch_, kv_head_, block * size, keys_of(block), p_.head_dim, T(1), size, rows_);
    transpose(rows_, depth, size, depth, keys_ + block * depth * size, size);
    T* values = values_ + block * size * value_depth;
    load_rows(p_.value, batch_, kv_head_, block * size, keys_of(block), p_.value_dim, T(1), size, values);
    finite_[block] = all_finite(values, size * value_depth);
    packed_[block] = 1;
  }

  Matrix<T> in_place(const View& v, int64_t block) const {
    return {row_in_place<T>(v, batch_, kv_head_, block * size, 0), v.stride[2]};
  }

  Matrix<T> copied(const View& v, int64_t block, int64_t columns, T* dst) const {
    load_rows(v, batch_, kv_head_, block * size, keys_of(block), columns, T(1), keys_of(block), dst);
    return {dst, padded(columns)};
  }

  const AttentionParams& p_;
  bool packs_, keys_in_place_, values_in_place_;
  int64_t batch_ = -1, kv_head_ = -1;
  T *keys_, *values_, *rows_;
  uint8_t *packed_, *finite_;  // per block
};

}  // namespace
}  // namespace mha_ext::cpu
