// Backward of one task: five tile products per (key block, query block), with queries in the vector lanes, so that
// log-sum-exp and delta are plain loads and nothing is reduced across lanes:
//   S^T = K Q^T, dP^T = V dO^T, then P^T = e^(S^T - LSE) and dS^T = P^T (dP^T - delta), then
//   dV += P^T dO, dK += dS^T Q, dQ^T += K^T dS^T.
// dQ is kept transposed: no tile is transposed on the way. Few rows have a backward of their own, backward_few_rows.h.
#pragma once

#include "delta.h"
#include "dropout.h"
#include "gemm.h"
#include "mask.h"
#include "softcap.h"
#include "workspace.h"

#include <thread>

namespace mha_ext::cpu {
namespace {

template <typename T>
struct BackwardScratch {
  int64_t query_block, key_block;  // padded tile
  int64_t depth, value_depth;      // padded head sizes
  int64_t query_blocks, key_blocks;

  // Query side of the head at hand, per query block.
  int64_t batch = -1, head = -1;
  T *queries, *queries_t;            // scale Q (query_block, D), its transpose
  T *grad_output, *grad_output_t;    // dO (query_block, Dv), its transpose
  T *logsumexp, *delta;              // (query_block); +inf for rows that are dead or padding, so that their P is 0
  T* normalizer;                     // what e^(S - LSE) is multiplied by: 1 unless LSE is too large to be exact
  uint32_t *first_key, *second_key;  // dropout row keys
  uint8_t *dead, *any_dead;          // per row, per block
  uint8_t *queries_finite, *grad_output_finite;
  T* grad_query_t;  // dQ^T / scale (query_blocks, D, query_block)

  // Key side of the task, per key block of the task.
  T *keys, *keys_t, *values;   // K (key_block, D), its transpose, V (key_block, Dv)
  T *grad_keys, *grad_values;  // dK / scale, dV
  uint8_t* keys_finite;
  T* other_keys;  // K of a block that may be another task's

  // One tile: rows are keys, lanes are queries.
  T *scores, *grad_scores;  // S^T then P^T (after dropout), dP^T then dS^T
  T *added, *added_t;       // bias, -inf where hidden: (query_block, key_block), its transpose
  T *grad_weights, *grad_weights_t;
  T* slopes;                       // dS / d(scale Q K^T) of a softcap
  T *row, *factors, *weight_sums;  // one row of anything

  BackwardScratch(const BackwardParams& p, const GradQueryOrder& order, int64_t task_key_blocks, Workspace& w) {
    query_block = padded(std::min(p.tile.backward_queries, p.q_len));
    key_block = padded(std::min(p.tile.backward_keys, p.kv_len));
    depth = padded(p.head_dim);
    value_depth = padded(p.value_dim);
    query_blocks = p.query_blocks();
    key_blocks = p.key_blocks();
    const int64_t rows = query_blocks * query_block;
    queries = w.take<T>(rows * depth);
    queries_t = w.take<T>(rows * depth);
    grad_output = w.take<T>(rows * value_depth);
    grad_output_t = w.take<T>(rows * value_depth);
    logsumexp = w.take<T>(rows);
    delta = w.take<T>(rows);
    normalizer = w.take<T>(rows);
    other_keys = w.take<T>(key_block * depth);
    first_key = w.take<uint32_t>(rows);
    second_key = w.take<uint32_t>(rows);
    dead = w.take<uint8_t>(rows);
    any_dead = w.take<uint8_t>(query_blocks);
    queries_finite = w.take<uint8_t>(query_blocks);
    grad_output_finite = w.take<uint8_t>(query_blocks);
    grad_query_t = order.accumulator ? nullptr : w.take<T>(rows * depth);
    const int64_t columns = task_key_blocks * key_block;
    keys = w.take<T>(columns * depth);
    keys_t = w.take<T>(columns * depth);
    values = w.take<T>(columns * value_depth);
    grad_keys = w.take<T>(columns * depth);
    grad_values = w.take<T>(columns * value_depth);
    keys_finite = w.take<uint8_t>(task_key_blocks);
    scores = w.take<T>(key_block * query_block);
    grad_scores = w.take<T>(key_block * query_block);
    const bool adds = p.hides_anything();
    added = adds ? w.take<T>(query_block * key_block) : nullptr;
    added_t = adds ? w.take<T>(query_block * key_block) : nullptr;
    grad_weights = p.grad_weights ? w.take<T>(query_block * key_block) : nullptr;
    grad_weights_t = p.grad_weights ? w.take<T>(query_block * key_block) : nullptr;
    slopes = p.softcap > 0 ? w.take<T>(key_block * query_block) : nullptr;
    row = w.take<T>(std::max({depth, value_depth, key_block, query_block}));
    factors = w.take<T>(query_block);
    weight_sums = w.take<T>(query_block);
  }
};

// added_t <- bias, -inf where hidden, for one tile that is not full. Padding queries see nothing, or a NaN key would
// reach their P.
template <typename T>
void added_tile(const BackwardParams& p, BackwardScratch<T>& s, const Tile& t, TileKind kind) {
  const bool whole = t.queries == s.query_block && t.keys == s.key_block;
  const T* bias = kind == TileKind::biased ? row_in_place<T>(p.bias, t.batch, t.head, t.query, t.key) : nullptr;
  if (whole && bias) return transpose(bias, p.bias.stride[2], s.query_block, s.key_block, s.added_t, s.query_block);
  fill(s.added, t.queries * s.key_block, T(0));
  fill(s.added + t.queries * s.key_block, (s.query_block - t.queries) * s.key_block, -kInfinity<T>);
  for (int64_t r = 0; r < t.queries; ++r) hide(p, t, r, s.row, s.added + r * s.key_block);
  transpose(s.added, s.key_block, s.query_block, s.key_block, s.added_t, s.query_block);
}

template <typename T>
void grad_weights_tile(const BackwardParams& p, BackwardScratch<T>& s, const Tile& t) {
  fill(s.grad_weights, s.query_block * s.key_block, T(0));
  for (int64_t r = 0; r < t.queries; ++r) {
    load_row(p.grad_weights, t.batch, t.head, t.query + r, t.key, t.keys, T(1), s.grad_weights + r * s.key_block);
  }
  transpose(s.grad_weights, s.key_block, s.query_block, s.key_block, s.grad_weights_t, s.query_block);
}

// What dropout multiplies the weights of one key by; null without dropout.
template <typename T>
const T* dropout_factors(const BackwardParams& p, BackwardScratch<T>& s, int64_t q_block, int64_t key) {
  if (!p.dropout.active) return nullptr;
  const int64_t first = q_block * s.query_block;
  keep_factors(p.dropout, s.first_key + first, s.second_key + first, key, s.query_block, s.factors);
  return s.factors;
}

// From the scores of all keys, for the rows of one block: normalizer <- 1 / sum_j e^(S_j - LSE), and what is missing of
// delta where weights that have a gradient were not kept: sum_j dW_j W_j.
template <typename T>
void sum_rows(const BackwardParams& p, BackwardScratch<T>& s, Tile t, int64_t q_block) {
  const int64_t lanes = s.query_block;
  const T* logsumexp = s.logsumexp + q_block * lanes;
  T* sums = s.normalizer + q_block * lanes;
  fill(sums, lanes, T(0));
  fill(s.weight_sums, lanes, T(0));
  const bool sums_weights = p.sums_weights();
  for (int64_t block = 0; block < s.key_blocks; ++block) {
    t.key = block * p.tile.backward_keys;
    t.keys = std::min(p.tile.backward_keys, p.kv_len - t.key);
    const TileKind kind = select_keys(p, &t, 1, t.key, t.keys);
    if (kind == TileKind::empty) continue;
    load_rows(p.key, t.batch, t.head / p.group(), t.key, t.keys, p.head_dim, T(1), s.key_block, s.other_keys);
    matmul(padded(t.keys), lanes, p.head_dim, s.other_keys, s.depth, s.queries_t + q_block * lanes * s.depth, lanes,
           s.scores, lanes, false);
    if (kind != TileKind::full) added_tile(p, s, t, kind);
    if (sums_weights) grad_weights_tile(p, s, t);
    for (int64_t j = 0; j < t.keys; ++j) {
      T* scores = s.scores + j * lanes;
      if (p.softcap > 0) cap_row(static_cast<T>(p.softcap), lanes, scores);
      const T* factors =
          sums_weights && !p.weights_before_dropout ? dropout_factors(p, s, q_block, t.key + j) : nullptr;
      for (int64_t i = 0; i < lanes; i += kWidth<T>) {
        Vec<T> score = load(scores + i);
        if (kind != TileKind::full) score = add_or_hide<T>(score, load(s.added_t + j * lanes + i));
        Vec<T> weight = exp2((score - load(logsumexp + i)) * kLog2e<T>);
        store(sums + i, load(sums + i) + weight);
        if (!sums_weights) continue;
        if (factors) weight *= load(factors + i);
        const Vec<T> term = weight == T(0) ? Vec<T>{} : weight * load(s.grad_weights_t + j * lanes + i);
        store(s.weight_sums + i, load(s.weight_sums + i) + term);
      }
    }
  }
  for (int64_t i = 0; i < lanes; ++i) {
    sums[i] = inverse_of_sum(sums[i]);
    if (sums_weights) s.delta[q_block * lanes + i] += s.weight_sums[i] * sums[i];
  }
}

// Everything of one head that lives on the query side: Q, dO and their transposes, LSE, delta, dropout keys.
template <typename T>
void pack_query_side(const BackwardParams& p, BackwardScratch<T>& s, int64_t batch, int64_t head) {
  if (s.batch == batch && s.head == head) return;
  s.batch = batch;
  s.head = head;
  const int64_t step = std::min(s.query_block, s.key_block);
  for (int64_t block = 0; block < s.query_blocks; ++block) {
    const int64_t query = block * p.tile.backward_queries;
    const int64_t rows = std::min(p.tile.backward_queries, p.q_len - query);
    T* queries = s.queries + block * s.query_block * s.depth;
    T* grad_output = s.grad_output + block * s.query_block * s.value_depth;
    load_rows(p.query, batch, head, query, rows, p.head_dim, static_cast<T>(p.scale), s.query_block, queries);
    load_rows(p.grad_output, batch, head, query, rows, p.value_dim, T(1), s.query_block, grad_output);
    s.queries_finite[block] = all_finite(queries, s.query_block * s.depth);
    s.grad_output_finite[block] = all_finite(grad_output, s.query_block * s.value_depth);
    transpose(queries, s.depth, s.query_block, s.depth, s.queries_t + block * s.query_block * s.depth, s.query_block);
    transpose(grad_output, s.value_depth, s.query_block, s.value_depth,
              s.grad_output_t + block * s.query_block * s.value_depth, s.query_block);
    s.any_dead[block] = 0;
    bool inexact = false;
    for (int64_t r = 0; r < s.query_block; ++r) {
      RowState<T> row;  // of padding
      if (r < rows) {
        row = row_state(p, batch, head, query + r, grad_output + r * s.value_depth, step, s.row, s.factors);
      }
      const int64_t i = block * s.query_block + r;
      s.logsumexp[i] = row.logsumexp;
      s.normalizer[i] = T(1);
      s.delta[i] = row.delta;
      s.dead[i] = row.dead;
      s.any_dead[block] |= row.dead;
      inexact |= is_inexact(row.logsumexp);
    }
    for (int64_t r = 0; r < s.query_block && p.dropout.active; ++r) {
      const RowKeys keys = row_keys(p.dropout, batch, head, query + r);
      s.first_key[block * s.query_block + r] = keys.first;
      s.second_key[block * s.query_block + r] = keys.second;
    }
    if (inexact || p.sums_weights()) sum_rows(p, s, {batch, head, query, rows, 0, 0}, block);
  }
}

template <typename T>
void pack_key_side(const BackwardParams& p, BackwardScratch<T>& s, int64_t batch, int64_t kv_head, int64_t block,
                   int64_t slot) {
  const int64_t key = block * p.tile.backward_keys;
  const int64_t keys = std::min(p.tile.backward_keys, p.kv_len - key);
  T* rows = s.keys + slot * s.key_block * s.depth;
  load_rows(p.key, batch, kv_head, key, keys, p.head_dim, T(1), s.key_block, rows);
  s.keys_finite[slot] = all_finite(rows, s.key_block * s.depth);
  transpose(rows, s.depth, s.key_block, s.depth, s.keys_t + slot * s.key_block * s.depth, s.key_block);
  load_rows(p.value, batch, kv_head, key, keys, p.value_dim, T(1), s.key_block,
            s.values + slot * s.key_block * s.value_depth);
  fill(s.grad_keys + slot * s.key_block * s.depth, s.key_block * s.depth, T(0));
  fill(s.grad_values + slot * s.key_block * s.value_depth, s.key_block * s.value_depth, T(0));
}

template <typename T>
void store_key_side(const BackwardParams& p, BackwardScratch<T>& s, int64_t batch, int64_t kv_head, int64_t block,
                    int64_t slot) {
  const int64_t key = block * p.tile.backward_keys;
  const int64_t keys = std::min(p.tile.backward_keys, p.kv_len - key);
  for (int64_t j = 0; j < keys; ++j) {
    // Q was packed scaled, so dK = dS^T (scale Q) is complete
    store_row(p.grad_key, batch, kv_head, key + j, 0, p.head_dim, T(1),
              s.grad_keys + (slot * s.key_block + j) * s.depth);
    store_row(p.grad_value, batch, kv_head, key + j, 0, p.value_dim, T(1),
              s.grad_values + (slot * s.key_block + j) * s.value_depth);
  }
}

// One row (one key) of a tile without masks, dropout or returned weights.
template <typename T>
inline void plain_row(int64_t n, const T* logsumexp, const T* normalizer, const T* delta, T* scores, T* grad_scores) {
  for (int64_t i = 0; i < n; i += kWidth<T>) {
    const Vec<T> probability = exp2((load(scores + i) - load(logsumexp + i)) * kLog2e<T>) * load(normalizer + i);
    store(scores + i, probability);                                                   // P^T
    store(grad_scores + i, probability * (load(grad_scores + i) - load(delta + i)));  // dS^T
  }
}

// The same with everything: added, gradient of the weights, dropout factors (each or null), uniform dead rows (or
// null).
template <typename T>
inline void general_row(const BackwardParams& p, int64_t n, const T* logsumexp, const T* normalizer, const T* delta,
                        const T* added, const T* grad_weights, const T* factors, const uint8_t* uniform, T* scores,
                        T* grad_scores) {
  for (int64_t i = 0; i < n; i += kWidth<T>) {
    Vec<T> grad = load(grad_scores + i);
    if (grad_weights && !p.weights_before_dropout) grad += load(grad_weights + i);
    if (factors) grad = load(factors + i) == T(0) ? Vec<T>{} : grad * load(factors + i);
    if (grad_weights && p.weights_before_dropout) grad += load(grad_weights + i);
    Vec<T> score = load(scores + i);
    if (added) score = add_or_hide<T>(score, load(added + i));
    Vec<T> probability = exp2((score - load(logsumexp + i)) * kLog2e<T>) * load(normalizer + i);
    grad = probability * (grad - load(delta + i));
    store(grad_scores + i, score == -kInfinity<T> ? Vec<T>{} : grad);
    probability = score == -kInfinity<T> ? Vec<T>{} : probability;
    store(scores + i, factors ? probability * load(factors + i) : probability);
  }
  if (!uniform) return;
  const T probability = T(1) / static_cast<T>(p.kv_len);
  for (int64_t i = 0; i < n; ++i) scores[i] = uniform[i] ? probability * (factors ? factors[i] : T(1)) : scores[i];
}

// S^T and dP^T become P^T (as it multiplied V) and dS^T; rows beyond t.keys become 0.
template <typename T>
void softmax_backward_tile(const BackwardParams& p, BackwardScratch<T>& s, const Tile& t, TileKind kind,
                           int64_t q_block) {
  const int64_t lanes = s.query_block;
  const T* logsumexp = s.logsumexp + q_block * lanes;
  const T* normalizer = s.normalizer + q_block * lanes;
  const T* delta = s.delta + q_block * lanes;
  const bool uniform = p.uniform_dead_rows && s.any_dead[q_block];
  const bool plain = kind == TileKind::full && !p.grad_weights && !p.dropout.active && !uniform;
  if (kind != TileKind::full) added_tile(p, s, t, kind);
  if (p.grad_weights) grad_weights_tile(p, s, t);
  for (int64_t j = 0; j < t.keys; ++j) {
    T* scores = s.scores + j * lanes;
    T* grad_scores = s.grad_scores + j * lanes;
    if (p.softcap > 0) cap_row(static_cast<T>(p.softcap), lanes, scores, s.slopes + j * lanes);
    if (plain) {
      plain_row(lanes, logsumexp, normalizer, delta, scores, grad_scores);
      continue;
    }
    const T* factors = dropout_factors(p, s, q_block, t.key + j);
    general_row(p, lanes, logsumexp, normalizer, delta, kind != TileKind::full ? s.added_t + j * lanes : nullptr,
                p.grad_weights ? s.grad_weights_t + j * lanes : nullptr, factors,
                uniform ? s.dead + q_block * lanes : nullptr, scores, grad_scores);
  }
  const int64_t rest = (padded(t.keys) - t.keys) * lanes;
  fill(s.scores + t.keys * lanes, rest, T(0));
  fill(s.grad_scores + t.keys * lanes, rest, T(0));
}

// grad_bias += dS, transposed back; broadcast dimensions have stride 0, and this task owns what it adds to
template <typename T>
void add_grad_bias(const BackwardParams& p, BackwardScratch<T>& s, const Tile& t) {
  transpose(s.grad_scores, s.query_block, padded(t.keys), s.query_block, s.added, s.key_block);
  for (int64_t r = 0; r < t.queries; ++r) {
    add_row(p.grad_bias, t.batch, t.head, t.query + r, t.key, t.keys, T(1), s.added + r * s.key_block);
  }
}

// Waits until key block k - 1 has passed the query block that is number `step` on its way; see GradQueryOrder.
inline void wait_for_turn(const GradQueryOrder& order, int64_t progress_index, int64_t key_block, int64_t step) {
  if (!order.progress || key_block == 0) return;
  const std::atomic<int64_t>& previous = order.progress[progress_index - 1];
  while (previous.load(std::memory_order_acquire) <= step && !order.stopped->load(std::memory_order_relaxed)) {
    std::this_thread::yield();
  }
}

// dQ block complete: transpose back, scale, store.
template <typename T>
void store_grad_query(const BackwardParams& p, BackwardScratch<T>& s, const Tile& t, const T* grad_query_t) {
  T* rows = s.scores;  // (query_block, D) fits: both tile operands are free by now
  for (int64_t d = 0; d < s.depth; d += kLanes) {
    transpose(grad_query_t + d * s.query_block, s.query_block, kLanes, s.query_block, rows, kLanes);
    const int64_t n = std::min(kLanes, p.head_dim - d);
    for (int64_t r = 0; r < t.queries; ++r) {
      store_row(p.grad_query, t.batch, t.head, t.query + r, d, n, static_cast<T>(p.scale), rows + r * kLanes);
    }
  }
}

// The last block of keys that limits leave to be seen from a block of queries: with it dQ is complete. Later queries
// see as many keys or more, so a key block has to do with the first of the steps only, and waits for nothing after
// them.
inline int64_t last_key_block(const BackwardParams& p, const Tile& t) {
  const int64_t most = visible_keys(p, t.batch, t.query + t.queries - 1);
  return most == 0 ? 0 : (most - 1) / p.tile.backward_keys;
}

// All five products of one tile; dQ is added in key-block order.
template <typename T>
void backward_tile(const BackwardParams& p, BackwardScratch<T>& s, const GradQueryOrder& order, Tile t,
                   int64_t key_block, int64_t slot, int64_t step) {
  const int64_t q_block = s.query_blocks - 1 - step;
  const int64_t lanes = s.query_block, keys = t.keys;
  // Uniform dead rows see every key after all.
  const bool reaches_dead = p.uniform_dead_rows && s.any_dead[q_block];
  const TileKind kind = reaches_dead ? TileKind::partial : select_keys(p, &t, 1, t.key, keys);
  const int64_t columns = padded(t.keys);
  const bool live = kind != TileKind::empty, hides = kind != TileKind::full || t.keys < keys;
  if (live) {
    const T* queries = s.queries + q_block * lanes * s.depth;
    const T* grad_output = s.grad_output + q_block * lanes * s.value_depth;
    for (const View* v : {&p.mask, &p.bias, &p.grad_weights, &p.grad_bias}) prefetch_tile(*v, t);
    // S^T <- K (scale Q)^T,  dP^T <- V dO^T
    matmul(columns, lanes, p.head_dim, s.keys + slot * s.key_block * s.depth, s.depth,
           s.queries_t + q_block * lanes * s.depth, lanes, s.scores, lanes, false);
    matmul(columns, lanes, p.value_dim, s.values + slot * s.key_block * s.value_depth, s.value_depth,
           s.grad_output_t + q_block * lanes * s.value_depth, lanes, s.grad_scores, lanes, false);
    softmax_backward_tile(p, s, t, kind, q_block);
    if (p.grad_bias) add_grad_bias(p, s, t);
    if (p.softcap > 0) multiply_by_slope(t.keys * lanes, s.slopes, s.grad_scores);
    // dV += P^T dO,  dK += dS^T (scale Q)
    const auto values_product = hides && !s.grad_output_finite[q_block] ? matmul_skipping_zeros_of_a<T> : matmul<T>;
    values_product(columns, s.value_depth, lanes, s.scores, lanes, grad_output, s.value_depth,
                   s.grad_values + slot * s.key_block * s.value_depth, s.value_depth, true);
    const auto keys_product = hides && !s.queries_finite[q_block] ? matmul_skipping_zeros_of_a<T> : matmul<T>;
    keys_product(columns, s.depth, lanes, s.grad_scores, lanes, queries, s.depth,
                 s.grad_keys + slot * s.key_block * s.depth, s.depth, true);
  }
  const int64_t last = last_key_block(p, t);
  if (key_block > last) return;  // nothing but dead rows sees these keys
  const int64_t head = t.batch * p.heads + t.head;
  const int64_t progress_index = head * s.key_blocks + key_block;
  T* grad_query_t = order.accumulator
                        ? static_cast<T*>(order.accumulator) + (head * s.query_blocks + q_block) * s.depth * lanes
                        : s.grad_query_t + q_block * s.depth * lanes;
  wait_for_turn(order, progress_index, key_block, step);
  if (live) {
    // dQ^T += K^T dS^T
    const auto queries_product = hides && !s.keys_finite[slot] ? matmul_skipping_zeros_of_b<T> : matmul<T>;
    queries_product(s.depth, lanes, columns, s.keys_t + slot * s.key_block * s.depth, s.key_block, s.grad_scores, lanes,
                    grad_query_t, lanes, key_block > 0);
  } else if (key_block == 0) {
    fill(grad_query_t, s.depth * lanes, T(0));
  }
  if (key_block == last) store_grad_query(p, s, t, grad_query_t);
  if (order.progress) order.progress[progress_index].store(step + 1, std::memory_order_release);
}

template <typename T>
void backward_kv_head(const BackwardParams& p, const BackwardTask& task, const GradQueryOrder& order,
                      BackwardScratch<T>& s, int64_t batch, int64_t kv_head) {
  for (int64_t block = task.first_block; block < task.last_block; ++block) {
    pack_key_side(p, s, batch, kv_head, block, block - task.first_block);
  }
  for (int64_t head = kv_head * p.group(); head < (kv_head + 1) * p.group(); ++head) {
    pack_query_side(p, s, batch, head);
    for (int64_t block = task.first_block; block < task.last_block; ++block) {
      const int64_t key = block * p.tile.backward_keys;
      // From the last query to the first: under a causal mask later keys then end early rather than wait for their
      // turn.
      for (int64_t step = 0; step < s.query_blocks; ++step) {
        const int64_t query = (s.query_blocks - 1 - step) * p.tile.backward_queries;
        const Tile tile = {batch, head,
                           query, std::min(p.tile.backward_queries, p.q_len - query),
                           key,   std::min(p.tile.backward_keys, p.kv_len - key)};
        backward_tile(p, s, order, tile, block, block - task.first_block, step);
      }
    }
  }
  for (int64_t block = task.first_block; block < task.last_block; ++block) {
    store_key_side(p, s, batch, kv_head, block, block - task.first_block);
  }
}

}  // namespace
}  // namespace mha_ext::cpu
