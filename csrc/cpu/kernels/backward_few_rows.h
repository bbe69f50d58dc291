// Backward of rows so few that packing would cost more than the products: queries are rows and keys are lanes, as in
// the forward, keys and values are read in place, and all rows that share a key head are taken at once:
//   S = scale Q K^T, dP = dO V^T, then P = e^(S - LSE) and dS = P (dP - delta), then
//   dV = P^T dO, dK = dS^T (scale Q), dQ += scale dS K.
#pragma once

#include "delta.h"
#include "dropout.h"
#include "few_rows.h"
#include "key_blocks.h"
#include "mask.h"
#include "softcap.h"

namespace mha_ext::cpu {
namespace {

template <typename T>
struct FewRowsBackwardScratch {
  KeyBlocks<T> blocks;
  int64_t rows;                // of all query heads that share a key head
  T *queries, *grad_output;    // scale Q (rows, D), dO (rows, Dv)
  T* weight_sums;              // (rows): sum_j dW_j W_j
  T *logsumexp, *normalizer;   // (rows), see delta.h; 1 / sum_j e^(S_j - LSE) where LSE is too large to be exact
  T *delta, *grad_query;       // (rows); dQ / scale (rows, D)
  uint8_t* dead;               // (rows)
  RowKeys* dropout;            // (rows)
  T *scores, *grad_scores;     // (rows, keys of a block): S then P (after dropout), dP then dS
  T *grad_keys, *grad_values;  // (keys of a block, D), (keys of a block, Dv)
  T* slopes;                   // dS / d(scale Q K^T) of a softcap
  T *row, *factors;            // (keys of a block or Dv)
  Tile* heads;                 // the rows of each query head
  bool any_dead, queries_finite, grad_output_finite;

  FewRowsBackwardScratch(const BackwardParams& p, Workspace& w) : blocks(p, w), rows(p.group() * p.q_len) {
    queries = w.take<T>(rows * blocks.depth);
    grad_output = w.take<T>(rows * blocks.value_depth);
    weight_sums = w.take<T>(rows);
    logsumexp = w.take<T>(rows);
    normalizer = w.take<T>(rows);
    delta = w.take<T>(rows);
    grad_query = w.take<T>(rows * blocks.depth);
    dead = w.take<uint8_t>(rows);
    dropout = w.take<RowKeys>(rows);
    scores = w.take<T>(rows * blocks.size);
    grad_scores = w.take<T>(rows * blocks.size);
    grad_keys = w.take<T>(blocks.size * blocks.depth);
    grad_values = w.take<T>(blocks.size * blocks.value_depth);
    slopes = p.softcap > 0 ? w.take<T>(rows * blocks.size) : nullptr;
    row = w.take<T>(std::max(blocks.size, blocks.value_depth));
    factors = w.take<T>(std::max(blocks.size, blocks.value_depth));
    heads = w.take<Tile>(p.group());
  }
};

// Dead rows see every key after all if they are uniform.
template <typename T>
TileKind select_block(const BackwardParams& p, FewRowsBackwardScratch<T>& s, int64_t block) {
  const int64_t key = block * s.blocks.size, keys = s.blocks.keys_of(block);
  if (!p.uniform_dead_rows || !s.any_dead) return select_keys(p, s.heads, p.group(), key, keys);
  point_at(s.heads, p.group(), key, keys);
  return TileKind::partial;
}

// S <- scale Q K^T, capped, with bias and -inf where hidden; padding keys are hidden.
template <typename T>
void few_rows_scores(const BackwardParams& p, FewRowsBackwardScratch<T>& s, TileKind kind, const Matrix<T>& keys) {
  few_rows_matmul_transposed(s.rows, s.heads->keys, s.blocks.depth, s.queries, s.blocks.depth, keys.data, keys.ld,
                             s.scores, s.blocks.size);
  for (const Tile* t = s.heads; t < s.heads + p.group(); ++t) {
    for (int64_t i = 0; i < t->queries; ++i) {
      const int64_t row = (t->row + i) * s.blocks.size;
      if (p.softcap > 0) cap_row(static_cast<T>(p.softcap), padded(t->keys), s.scores + row, s.slopes + row);
      apply_masks(p, *t, kind, i, s.row, s.scores + row);
    }
  }
}

// The gradient of the weights of a row, from the keys of a tile; null if there is none.
template <typename T>
const T* grad_weights_row(const BackwardParams& p, FewRowsBackwardScratch<T>& s, const Tile& t, int64_t i) {
  if (!p.grad_weights) return nullptr;
  return padded_row(p.grad_weights, t.batch, t.head, t.query + i, t.key, t.keys, s.row);
}

// What dropout multiplies the weights of a row by; null without dropout.
template <typename T>
const T* dropout_factors(const BackwardParams& p, FewRowsBackwardScratch<T>& s, const Tile& t, int64_t i) {
  if (!p.dropout.active) return nullptr;
  keep_factors(p.dropout, s.dropout[t.row + i], t.key, padded(t.keys), s.factors);
  return s.factors;
}

// sum_j dW_j e^(S_j - LSE) of one row of a tile, times dropout's factors if the weights were returned after dropout
template <typename T>
T sum_weights(const BackwardParams& p, FewRowsBackwardScratch<T>& s, const Tile& t, int64_t i) {
  const T* scores = s.scores + (t.row + i) * s.blocks.size;
  const T* grad_weights = grad_weights_row(p, s, t, i);
  const T* factors = p.weights_before_dropout ? nullptr : dropout_factors(p, s, t, i);
  Vec<T> sum{};
  for (int64_t j = 0; j < padded(t.keys); j += kWidth<T>) {
    Vec<T> weight = exp2((load(scores + j) - s.logsumexp[t.row + i]) * kLog2e<T>);
    if (factors) weight *= load(factors + j);
    sum += weight == T(0) ? Vec<T>{} : weight * load(grad_weights + j);
  }
  return horizontal_sum<T>(sum);
}

// From the scores of all keys: normalizer <- 1 / sum_j e^(S_j - LSE), and what is missing of delta where weights that
// have a gradient were not kept: sum_j dW_j W_j.
template <typename T>
void sum_few_rows(const BackwardParams& p, FewRowsBackwardScratch<T>& s) {
  fill(s.normalizer, s.rows, T(0));
  fill(s.weight_sums, s.rows, T(0));
  for (int64_t block = 0; block < s.blocks.count; ++block) {
    const TileKind kind = select_block(p, s, block);
    if (kind == TileKind::empty) continue;
    few_rows_scores(p, s, kind, s.blocks.keys(block));
    for (int64_t r = 0; r < s.rows; ++r) {
      const T* scores = s.scores + r * s.blocks.size;
      Vec<T> sum{};
      for (int64_t j = 0; j < padded(s.heads->keys); j += kWidth<T>) {
        sum += exp2((load(scores + j) - s.logsumexp[r]) * kLog2e<T>);
      }
      s.normalizer[r] += horizontal_sum<T>(sum);
    }
    for (const Tile* t = s.heads; t < s.heads + p.group() && p.sums_weights(); ++t) {
      for (int64_t i = 0; i < t->queries; ++i) s.weight_sums[t->row + i] += sum_weights(p, s, *t, i);
    }
  }
  for (int64_t r = 0; r < s.rows; ++r) {
    s.normalizer[r] = inverse_of_sum(s.normalizer[r]);
    s.delta[r] += s.weight_sums[r] * s.normalizer[r];
  }
}

// Everything that lives on the query side: Q, dO, LSE, delta, dropout keys of all rows of a key head.
template <typename T>
void load_few_rows(const BackwardParams& p, FewRowsBackwardScratch<T>& s, int64_t batch, int64_t kv_head) {
  const int64_t depth = s.blocks.depth, value_depth = s.blocks.value_depth;
  bool inexact = false;
  s.any_dead = false;
  for (int64_t h = 0; h < p.group(); ++h) {
    const int64_t head = kv_head * p.group() + h, first = h * p.q_len;
    s.heads[h] = {batch, head, 0, p.q_len, 0, 0, first};
    T* grad_output = s.grad_output + first * value_depth;
    load_rows(p.query, batch, head, 0, p.q_len, p.head_dim, static_cast<T>(p.scale), p.q_len,
              s.queries + first * depth);
    load_rows(p.grad_output, batch, head, 0, p.q_len, p.value_dim, T(1), p.q_len, grad_output);
    for (int64_t i = 0; i < p.q_len; ++i) {
      const int64_t r = first + i;
      const RowState<T> row =
          row_state(p, batch, head, i, grad_output + i * value_depth, s.blocks.size, s.row, s.factors);
      s.logsumexp[r] = row.logsumexp;
      s.normalizer[r] = T(1);
      s.delta[r] = row.delta;
      s.dead[r] = row.dead;
      s.any_dead |= row.dead;
      inexact |= is_inexact(row.logsumexp);
      if (p.dropout.active) s.dropout[r] = row_keys(p.dropout, batch, head, i);
    }
  }
  s.queries_finite = all_finite(s.queries, s.rows * depth);
  s.grad_output_finite = all_finite(s.grad_output, s.rows * value_depth);
  fill(s.grad_query, s.rows * depth, T(0));
  if (inexact || p.sums_weights()) sum_few_rows(p, s);
}

// One row of S and dP becomes P (as it multiplied V) and dS.
template <typename T>
void softmax_backward_row(const BackwardParams& p, FewRowsBackwardScratch<T>& s, const Tile& t, int64_t i) {
  const int64_t r = t.row + i, n = padded(t.keys);
  T* scores = s.scores + r * s.blocks.size;
  T* grad_scores = s.grad_scores + r * s.blocks.size;
  const T logsumexp = s.logsumexp[r], normalizer = s.normalizer[r], delta = s.delta[r];
  const T* grad_weights = grad_weights_row(p, s, t, i);
  const T* factors = dropout_factors(p, s, t, i);
  for (int64_t j = 0; j < n; j += kWidth<T>) {
    Vec<T> grad = load(grad_scores + j);
    if (grad_weights && !p.weights_before_dropout) grad += load(grad_weights + j);
    if (factors) grad = load(factors + j) == T(0) ? Vec<T>{} : grad * load(factors + j);
    if (grad_weights && p.weights_before_dropout) grad += load(grad_weights + j);
    const Vec<T> score = load(scores + j);
    Vec<T> probability = exp2((score - logsumexp) * kLog2e<T>) * normalizer;
    grad = probability * (grad - delta);
    store(grad_scores + j, score == -kInfinity<T> ? Vec<T>{} : grad);
    probability = score == -kInfinity<T> ? Vec<T>{} : probability;
    store(scores + j, factors ? probability * load(factors + j) : probability);
  }
  if (!s.dead[r] || !p.uniform_dead_rows) return;
  const T probability = T(1) / static_cast<T>(p.kv_len);
  for (int64_t j = 0; j < t.keys; ++j) scores[j] = probability * (factors ? factors[j] : T(1));
}

// dK and dV of one block of keys, and what it adds to dQ.
template <typename T>
void few_rows_products(FewRowsBackwardScratch<T>& s, bool hides, const Matrix<T>& keys) {
  const int64_t n = s.heads->keys, size = s.blocks.size, depth = s.blocks.depth, value_depth = s.blocks.value_depth;
  constexpr Storage transposed = Storage::transposed;
  const auto values_product =
      hides && !s.grad_output_finite ? matmul_skipping_zeros_of_a<T, transposed> : register_tiled_matmul<T, transposed>;
  values_product(n, value_depth, s.rows, s.scores, size, s.grad_output, value_depth, s.grad_values, value_depth, false);
  const auto keys_product =
      hides && !s.queries_finite ? matmul_skipping_zeros_of_a<T, transposed> : register_tiled_matmul<T, transposed>;
  keys_product(n, depth, s.rows, s.grad_scores, size, s.queries, depth, s.grad_keys, depth, false);
  const bool skips = hides && !rows_are_finite(keys, n, depth);
  const auto queries_product = skips ? matmul_skipping_zeros_of_a<T> : few_rows_matmul<T>;
  queries_product(s.rows, depth, n, s.grad_scores, size, keys.data, keys.ld, s.grad_query, depth, true);
}

// dQ of all parts instead of one, if this task is the last of its head to finish.
template <typename T>
bool merge_grad_query(const BackwardParams& p, const Parts& parts, FewRowsBackwardScratch<T>& s, int64_t part,
                      int64_t head) {
  const int64_t size = s.rows * s.blocks.depth;
  T* first = static_cast<T*>(parts.memory) + head * parts.count * size;
  std::memcpy(first + part * size, s.grad_query, size * sizeof(T));
  if (parts.finished[head].fetch_add(1) + 1 < parts.count) return false;
  fill(s.grad_query, size, T(0));
  for (int64_t i = 0; i < parts.count; ++i) {
    for (int64_t x = 0; x < size; ++x) s.grad_query[x] += first[i * size + x];
  }
  return true;
}

// All rows that share a key head, against the key blocks of the task.
template <typename T>
void few_rows_backward(const BackwardParams& p, const BackwardTask& task, const Parts& parts,
                       FewRowsBackwardScratch<T>& s, int64_t batch, int64_t kv_head) {
  const int64_t size = s.blocks.size, depth = s.blocks.depth, value_depth = s.blocks.value_depth;
  s.blocks.select(batch, kv_head);
  load_few_rows(p, s, batch, kv_head);
  for (int64_t block = task.first_block; block < task.last_block; ++block) {
    const TileKind kind = select_block(p, s, block);
    const int64_t key = block * size, keys_of_block = s.blocks.keys_of(block);
    const int64_t n = kind == TileKind::empty ? 0 : s.heads->keys;
    fill(s.grad_keys + n * depth, (keys_of_block - n) * depth, T(0));
    fill(s.grad_values + n * value_depth, (keys_of_block - n) * value_depth, T(0));
    if (n > 0) {
      const Matrix<T> values = s.blocks.values(block), keys = s.blocks.keys(block);
      few_rows_scores(p, s, kind, keys);
      few_rows_matmul_transposed(s.rows, n, value_depth, s.grad_output, value_depth, values.data, values.ld,
                                 s.grad_scores, size);
      for (const Tile* t = s.heads; t < s.heads + p.group(); ++t) {
        for (int64_t i = 0; i < t->queries; ++i) {
          softmax_backward_row(p, s, *t, i);
          // grad_bias += dS; broadcast dimensions have stride 0, and this task owns what it adds to
          T* grad_scores = s.grad_scores + (t->row + i) * size;
          if (p.grad_bias) add_row(p.grad_bias, batch, t->head, i, key, n, T(1), grad_scores);
          if (p.softcap > 0) multiply_by_slope(padded(n), s.slopes + (t->row + i) * size, grad_scores);
        }
      }
      few_rows_products(s, kind != TileKind::full || n < keys_of_block, keys);
    }
    for (int64_t j = 0; j < keys_of_block; ++j) {
      // Q was loaded scaled, so dK = dS^T (scale Q) is complete
      store_row(p.grad_key, batch, kv_head, key + j, 0, p.head_dim, T(1), s.grad_keys + j * depth);
      store_row(p.grad_value, batch, kv_head, key + j, 0, p.value_dim, T(1), s.grad_values + j * value_depth);
    }
  }
  if (parts.count > 1 && !merge_grad_query(p, parts, s, task.part, batch * p.kv_heads + kv_head)) return;
  for (const Tile* t = s.heads; t < s.heads + p.group(); ++t) {
    for (int64_t i = 0; i < t->queries; ++i) {
      store_row(p.grad_query, batch, t->head, i, 0, p.head_dim, static_cast<T>(p.scale),
                s.grad_query + (t->row + i) * depth);
    }
  }
}

}  // namespace
}  // namespace mha_ext::cpu
