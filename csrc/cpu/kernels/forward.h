// Forward of one task: for each block of queries, O = softmax(scale Q K^T + bias) V over blocks of keys.
#pragma once

#include "dropout.h"
#include "gemm.h"
#include "mask.h"
#include "softmax.h"
#include "workspace.h"

namespace mha_ext::cpu {
namespace {

// Scratch of one thread. Keys and values of the head at hand are packed block by block when first needed.
template <typename T>
struct ForwardScratch {
  int64_t key_block, blocks;   // keys of a block (padded), blocks of a head
  int64_t depth, value_depth;  // padded head sizes
  int64_t batch = -1, kv_head = -1;
  T *keys, *values;              // K^T (blocks, D, key_block), V (blocks, key_block, Dv)
  T *queries, *scores, *output;  // scale Q (queries, D), S (queries, key_block), O (queries, Dv)
  T *bias_row, *weights;         // (key_block), (queries, blocks * key_block) where the weights need converting
  T* tile_maxima;                // (blocks, queries): the running maximum under which a tile of weights was written
  SoftmaxRow<T>* rows;           // (queries)
  uint8_t *packed, *values_finite, *visited;  // per key block

  ForwardScratch(const AttentionParams& p, Workspace& w) {
    const int64_t queries_ = padded(std::min(p.tile.forward_queries, p.q_len));
    key_block = padded(std::min(p.tile.forward_keys, p.kv_len));
    blocks = p.kv_len == 0 ? 0 : (p.kv_len + key_block - 1) / key_block;
    depth = padded(p.head_dim);
    value_depth = padded(p.value_dim);
    keys = w.take<T>(blocks * depth * key_block);
    values = w.take<T>(blocks * key_block * value_depth);
    queries = w.take<T>(queries_ * depth);
    scores = w.take<T>(key_block * std::max(queries_, depth));  // also holds K (key_block, D) before transposition
    output = w.take<T>(queries_ * value_depth);
    bias_row = w.take<T>(key_block);
    weights = p.weights ? w.take<T>(queries_ * blocks * key_block) : nullptr;
    tile_maxima = p.weights ? w.take<T>(queries_ * blocks) : nullptr;
    rows = w.take<SoftmaxRow<T>>(queries_);
    packed = w.take<uint8_t>(blocks);
    values_finite = w.take<uint8_t>(blocks);
    visited = w.take<uint8_t>(blocks);
  }
};

template <typename T>
void pack_key_block(const AttentionParams& p, ForwardScratch<T>& s, int64_t block) {
  const int64_t key = block * s.key_block;
  const int64_t keys = std::min(s.key_block, p.kv_len - key);
  load_rows(p.key, s.batch, s.kv_head, key, keys, p.head_dim, T(1), s.key_block, s.scores);
  transpose(s.scores, s.depth, s.key_block, s.depth, s.keys + block * s.depth * s.key_block, s.key_block);
  T* values = s.values + block * s.key_block * s.value_depth;
  load_rows(p.value, s.batch, s.kv_head, key, keys, p.value_dim, T(1), s.key_block, values);
  s.values_finite[block] = all_finite(values, s.key_block * s.value_depth);
  s.packed[block] = 1;
}

// S <- softmax numerators of one tile, O <- O * alpha
template <typename T>
void softmax_tile(const AttentionParams& p, ForwardScratch<T>& s, const Tile& t, TileKind kind, int64_t block,
                  bool first) {
  const int64_t columns = padded(t.keys);
  for (int64_t r = 0; r < t.queries; ++r) {
    T* scores = s.scores + r * s.key_block;
    if (kind == TileKind::partial) hide(p, t, r, s.bias_row, scores);
    fill(scores + t.keys, columns - t.keys, -kInfinity<T>);
    const T alpha = softmax_step(s.rows[r], columns, scores);
    if (alpha != T(1) && !first) {
      T* output = s.output + r * s.value_depth;
      for (int64_t d = 0; d < s.value_depth; d += kWidth<T>) store(output + d, load(output + d) * alpha);
    }
    if (p.dropout.active) drop_row(p.dropout, row_keys(p.dropout, t.batch, t.head, t.query + r), t.key, t.keys, scores);
    if (p.weights) {
      std::memcpy(s.weights + r * s.blocks * s.key_block + t.key, scores, columns * sizeof(T));
      s.tile_maxima[r * s.blocks + block] = s.rows[r].maximum;
    }
  }
}

// weights[i, :] <- e^(s - m) / l / (1 - p) from the numerators of each tile, 0 in tiles that were skipped
template <typename T>
void store_weights(const AttentionParams& p, ForwardScratch<T>& s, const Tile& rows, int64_t r, T inverse) {
  T* weights = s.weights + r * s.blocks * s.key_block;
  for (int64_t block = 0; block < s.blocks; ++block) {
    const int64_t key = block * s.key_block;
    const int64_t keys = std::min(s.key_block, p.kv_len - key);
    T factor = inverse;
    if (!s.visited[block]) {
      fill(weights + key, keys, T(0));
      factor = T(1);
    } else {
      const T maximum = s.tile_maxima[r * s.blocks + block];
      if (maximum != s.rows[r].maximum) factor *= exp2_scalar<T>((maximum - s.rows[r].maximum) * kLog2e<T>);
      if (factor != factor) {  // a live NaN makes the visible weights of the row NaN, not the hidden ones
        for (int64_t j = key; j < key + keys; ++j) weights[j] = weights[j] == T(0) ? T(0) : factor;
        factor = T(1);
      }
    }
    store_row(p.weights, rows.batch, rows.head, rows.query + r, key, keys, factor, weights + key);
  }
}

// A row that saw no key, as the document's module has it: every key with weight 1 / Lk.
template <typename T>
void uniform_row(const AttentionParams& p, ForwardScratch<T>& s, const Tile& rows, int64_t r) {
  T* output = s.output + r * s.value_depth;
  fill(output, s.value_depth, T(0));
  const RowKeys keys = row_keys(p.dropout, rows.batch, rows.head, rows.query + r);
  T* weight = s.scores;  // (key_block)
  for (int64_t block = 0; block < s.blocks; ++block) {
    if (!s.packed[block]) pack_key_block(p, s, block);
    const int64_t key = block * s.key_block;
    const int64_t n = std::min(s.key_block, p.kv_len - key);
    fill(weight, n, T(1) / static_cast<T>(p.kv_len));
    if (p.dropout.active) drop_row(p.dropout, keys, key, n, weight);
    if (p.weights) {
      store_row(p.weights, rows.batch, rows.head, rows.query + r, key, n, static_cast<T>(p.dropout.keep_scale), weight);
    }
    matmul_skipping_zeros_of_a(1, s.value_depth, n, weight, n, s.values + block * s.key_block * s.value_depth,
                               s.value_depth, output, s.value_depth, true);
  }
}

// O <- O / l / (1 - p); writes output, log-sum-exp and weights of the rows of one block
template <typename T>
void finish_rows(const AttentionParams& p, ForwardScratch<T>& s, const Tile& rows) {
  const T keep_scale = static_cast<T>(p.dropout.keep_scale);
  for (int64_t r = 0; r < rows.queries; ++r) {
    const bool dead = s.rows[r].sum == T(0);
    const T lse = logsumexp(s.rows[r]);
    store_row(p.logsumexp, rows.batch, rows.head, rows.query + r, 0, 1, T(1), &lse);
    T inverse = dead ? T(0) : keep_scale / s.rows[r].sum;
    if (dead && p.uniform_dead_rows) {
      uniform_row(p, s, rows, r);
      inverse = keep_scale;
    } else if (p.weights) {
      store_weights(p, s, rows, r, inverse);
    }
    T* output = s.output + r * s.value_depth;
    if (dead && !p.uniform_dead_rows) fill(output, s.value_depth, T(0));  // may be unset, or 0 * NaN
    store_row(p.output, rows.batch, rows.head, rows.query + r, 0, p.value_dim, inverse, output);
  }
}

// One block of queries of one head against all keys it can see.
template <typename T>
void forward_block(const AttentionParams& p, ForwardScratch<T>& s, Tile t) {
  const int64_t padded_rows = padded(t.queries);
  load_rows(p.query, t.batch, t.head, t.query, t.queries, p.head_dim, static_cast<T>(p.scale), padded_rows, s.queries);
  for (int64_t r = 0; r < t.queries; ++r) s.rows[r] = {};
  std::memset(s.visited, 0, s.blocks);
  bool first = true;
  for (int64_t block = 0; block < s.blocks; ++block) {
    t.key = block * s.key_block;
    t.keys = std::min(s.key_block, p.kv_len - t.key);
    const TileKind kind = p.hides_anything() ? classify(p, t) : TileKind::full;
    if (kind == TileKind::empty) continue;
    if (!s.packed[block]) pack_key_block(p, s, block);
    s.visited[block] = 1;
    const int64_t columns = padded(t.keys);
    const T* values = s.values + block * s.key_block * s.value_depth;
    // S <- scale Q K^T
    matmul(padded_rows, columns, p.head_dim, s.queries, s.depth, s.keys + block * s.depth * s.key_block, s.key_block,
           s.scores, s.key_block, false);
    softmax_tile(p, s, t, kind, block, first);
    // O <- O alpha + P V
    const auto product =
        kind == TileKind::partial && !s.values_finite[block] ? matmul_skipping_zeros_of_a<T> : matmul<T>;
    product(padded_rows, s.value_depth, columns, s.scores, s.key_block, values, s.value_depth, s.output, s.value_depth,
            !first);
    first = false;
  }
  finish_rows(p, s, t);
}

template <typename T>
void forward_task(const AttentionParams& p, const ForwardTask& task, ForwardScratch<T>& s) {
  if (s.batch != task.batch || s.kv_head != task.kv_head) {
    s.batch = task.batch;
    s.kv_head = task.kv_head;
    std::memset(s.packed, 0, s.blocks);
  }
  for (int64_t i = task.first_block; i < task.last_block; ++i) {
    const int64_t head = task.kv_head * p.group() + i / p.query_blocks();
    const int64_t query = i % p.query_blocks() * p.tile.forward_queries;
    forward_block(p, s, {task.batch, head, query, std::min(p.tile.forward_queries, p.q_len - query), 0, 0});
  }
}

}  // namespace
}  // namespace mha_ext::cpu
