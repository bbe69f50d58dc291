// Forward of one task: for each block of rows, O = softmax(scale Q K^T + bias) V over blocks of keys. The rows of all
// query heads that share a key head are numbered through, so that short queries of several heads fill a tile together.
#pragma once

#include "dropout.h"
#include "few_rows.h"
#include "key_blocks.h"
#include "mask.h"
#include "softcap.h"
#include "softmax.h"

namespace mha_ext::cpu {
namespace {

// Scratch of one thread.
template <typename T>
struct ForwardScratch {
  KeyBlocks<T> blocks;
  int64_t rows_capacity;         // rows of a block (padded)
  T *queries, *scores, *output;  // scale Q (rows, D), S (rows, keys of a block), O (rows, Dv)
  T *bias_row, *sum;             // (keys of a block), (Dv)
  T* weights;                    // (rows, all keys): numerators of the weights
  T* tile_maxima;                // (rows, blocks): the running maximum under which a tile of weights was written
  SoftmaxRow<T>* rows;           // (rows)
  uint8_t* visited;              // per key block
  Tile* heads;                   // the rows of the block at hand, head by head
  int64_t heads_count;

  ForwardScratch(const AttentionParams& p, Workspace& w) : blocks(p, w) {
    rows_capacity = padded(std::min(p.tile.forward_queries, p.group() * p.q_len));
    queries = w.take<T>(rows_capacity * blocks.depth);
    scores = w.take<T>(rows_capacity * blocks.size);
    output = w.take<T>(rows_capacity * blocks.value_depth);
    bias_row = w.take<T>(blocks.size);
    sum = w.take<T>(blocks.value_depth);
    weights = p.weights ? w.take<T>(rows_capacity * blocks.count * blocks.size) : nullptr;
    tile_maxima = p.weights ? w.take<T>(rows_capacity * blocks.count) : nullptr;
    rows = w.take<SoftmaxRow<T>>(rows_capacity);
    visited = w.take<uint8_t>(blocks.count);
    heads = w.take<Tile>(std::min(rows_capacity, p.group()));
  }
};

// Keeps the numerators of row r of a tile for the weights.
template <typename T>
void keep_numerators(ForwardScratch<T>& s, const Tile& t, int64_t r, int64_t block, const T* scores) {
  T* weights = s.weights + r * s.blocks.count * s.blocks.size + t.key;
  std::memcpy(weights, scores, t.keys * sizeof(T));
  fill(weights + t.keys, s.blocks.keys_of(block) - t.keys, T(0));  // hidden from all rows
  s.tile_maxima[r * s.blocks.count + block] = s.rows[r].maximum;
}

// S <- softmax numerators of the rows of one head, O <- O * alpha
template <typename T>
void softmax_tile(const AttentionParams& p, ForwardScratch<T>& s, const Tile& t, TileKind kind, int64_t block,
                  bool first) {
  const int64_t columns = padded(t.keys), size = s.blocks.size, depth = s.blocks.value_depth;
  for (int64_t i = 0; i < t.queries; ++i) {
    const int64_t r = t.row + i;
    T* scores = s.scores + r * size;
    if (p.softcap > 0) cap_row(static_cast<T>(p.softcap), columns, scores);
    apply_masks(p, t, kind, i, s.bias_row, scores);
    const T alpha = softmax_step(s.rows[r], columns, scores);
    if (alpha != T(1) && !first) {
      T* output = s.output + r * depth;
      for (int64_t d = 0; d < depth; d += kWidth<T>) store(output + d, load(output + d) * alpha);
    }
    if (p.weights && p.weights_before_dropout) keep_numerators(s, t, r, block, scores);
    if (p.dropout.active) drop_row(p.dropout, row_keys(p.dropout, t.batch, t.head, t.query + i), t.key, t.keys, scores);
    if (p.weights && !p.weights_before_dropout) keep_numerators(s, t, r, block, scores);
  }
}

// weights[i, key : key + n] <- row * factor, or their share in the mean over the heads, which come in order
template <typename T>
void put_weights(const AttentionParams& p, const Tile& t, int64_t i, int64_t key, int64_t n, T factor, const T* row) {
  const int64_t query = t.query + i;
  if (!p.average_weights) return store_row(p.weights, t.batch, t.head, query, key, n, factor, row);
  const T share = factor / static_cast<T>(p.heads);
  if (t.head == 0) return store_row(p.weights, t.batch, 0, query, key, n, share, row);
  add_row(p.weights, t.batch, 0, query, key, n, share, row);
}

// weights[i, :] <- e^(s - m) / l / (1 - p) from the numerators of each tile, 0 in tiles that were skipped
template <typename T>
void store_weights(const AttentionParams& p, ForwardScratch<T>& s, const Tile& t, int64_t i, T inverse) {
  const int64_t r = t.row + i, blocks = s.blocks.count;
  T* weights = s.weights + r * blocks * s.blocks.size;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t key = block * s.blocks.size, keys = s.blocks.keys_of(block);
    T factor = inverse;
    if (!s.visited[block]) {
      fill(weights + key, keys, T(0));
      factor = T(1);
    } else {
      const T maximum = s.tile_maxima[r * blocks + block];
      if (maximum != s.rows[r].maximum) factor *= exp2_scalar<T>((maximum - s.rows[r].maximum) * kLog2e<T>);
      if (factor != factor) {  // a live NaN makes the visible weights of the row NaN, not the hidden ones
        for (int64_t j = key; j < key + keys; ++j) weights[j] = weights[j] == T(0) ? T(0) : factor;
        factor = T(1);
      }
    }
    put_weights(p, t, i, key, keys, factor, weights + key);
  }
}

// A row that saw no key, as the document's module has it: every key with weight 1 / Lk.
template <typename T>
void uniform_row(const AttentionParams& p, ForwardScratch<T>& s, const Tile& t, int64_t i) {
  const int64_t depth = s.blocks.value_depth;
  T* output = s.output + (t.row + i) * depth;
  fill(output, depth, T(0));
  const RowKeys keys = row_keys(p.dropout, t.batch, t.head, t.query + i);
  T* weight = s.scores;  // (keys of a block)
  for (int64_t block = 0; block < s.blocks.count; ++block) {
    const int64_t key = block * s.blocks.size, n = s.blocks.keys_of(block);
    fill(weight, n, T(1) / static_cast<T>(p.kv_len));
    if (p.weights && p.weights_before_dropout) put_weights(p, t, i, key, n, T(1), weight);
    if (p.dropout.active) drop_row(p.dropout, keys, key, n, weight);
    if (p.weights && !p.weights_before_dropout) {
      put_weights(p, t, i, key, n, static_cast<T>(p.dropout.keep_scale), weight);
    }
    const Matrix<T> values = s.blocks.values(block);
    // Summed in pieces, as rounding errors grow with the number of terms.
    for (int64_t j = 0; j < n; j += kLanes) {
      matmul_skipping_zeros_of_a(1, depth, std::min(kLanes, n - j), weight + j, n, values.data + j * values.ld,
                                 values.ld, s.sum, depth, false);
      for (int64_t d = 0; d < depth; ++d) output[d] += s.sum[d];
    }
  }
}

// O <- O / l / (1 - p); writes output, log-sum-exp and weights of the rows of one head
template <typename T>
void finish_rows(const AttentionParams& p, ForwardScratch<T>& s, const Tile& t) {
  const T keep_scale = static_cast<T>(p.dropout.keep_scale);
  for (int64_t i = 0; i < t.queries; ++i) {
    const SoftmaxRow<T>& row = s.rows[t.row + i];
    const bool dead = row.sum == T(0);
    const T lse = logsumexp(row);
    if (p.logsumexp) store_row(p.logsumexp, t.batch, t.head, t.query + i, 0, 1, T(1), &lse);
    const T normalizer = dead ? T(0) : T(1) / row.sum;
    T inverse = dead ? T(0) : keep_scale / row.sum;
    if (dead && p.uniform_dead_rows) {
      uniform_row(p, s, t, i);
      inverse = keep_scale;
    } else if (p.weights) {
      store_weights(p, s, t, i, p.weights_before_dropout ? normalizer : inverse);
    }
    T* output = s.output + (t.row + i) * s.blocks.value_depth;
    if (dead && !p.uniform_dead_rows) fill(output, s.blocks.value_depth, T(0));  // may be unset, or 0 * NaN
    store_row(p.output, t.batch, t.head, t.query + i, 0, p.value_dim, inverse, output);
  }
}

// s.heads <- the pieces of rows [first, first + rows), one for each head they belong to; loads their queries.
template <typename T>
void begin_rows(const AttentionParams& p, ForwardScratch<T>& s, const ForwardTask& task, int64_t first, int64_t rows) {
  s.heads_count = 0;
  for (int64_t row = 0; row < rows;) {
    const int64_t head = (first + row) / p.q_len, query = (first + row) % p.q_len;
    const int64_t queries = std::min(p.q_len - query, rows - row);
    const Tile t = {task.batch, task.kv_head * p.group() + head, query, queries, 0, 0, row};
    load_rows(p.query, t.batch, t.head, query, queries, p.head_dim, static_cast<T>(p.scale), queries,
              s.queries + row * s.blocks.depth);
    s.heads[s.heads_count++] = t;
    row += queries;
  }
  fill(s.queries + rows * s.blocks.depth, (padded(rows) - rows) * s.blocks.depth, T(0));
  for (int64_t r = 0; r < rows; ++r) s.rows[r] = {};
  std::memset(s.visited, 0, s.blocks.count);
}

// One block of rows against one block of keys; `first` when nothing was added to O before.
template <typename T>
void forward_tile(const AttentionParams& p, ForwardScratch<T>& s, int64_t rows, TileKind kind, int64_t block,
                  bool first) {
  const int64_t keys = s.heads[0].keys, size = s.blocks.size;
  const int64_t depth = s.blocks.depth, value_depth = s.blocks.value_depth;
  const bool hides = kind != TileKind::full || keys < s.blocks.keys_of(block);
  const Matrix<T> k = s.blocks.keys(block);
  // S <- scale Q K^T
  if (p.few_rows) {
    few_rows_matmul_transposed(rows, keys, depth, s.queries, depth, k.data, k.ld, s.scores, size);
  } else {
    matmul(padded(rows), padded(keys), p.head_dim, s.queries, depth, k.data, k.ld, s.scores, size, false);
  }
  for (int64_t h = 0; h < s.heads_count; ++h) softmax_tile(p, s, s.heads[h], kind, block, first);
  // O <- O alpha + P V
  const Matrix<T> v = s.blocks.values(block);
  if (hides && !s.blocks.values_are_finite(block, v)) {
    matmul_skipping_zeros_of_a(rows, value_depth, keys, s.scores, size, v.data, v.ld, s.output, value_depth, !first);
  } else if (p.few_rows) {
    few_rows_matmul(rows, value_depth, keys, s.scores, size, v.data, v.ld, s.output, value_depth, !first);
  } else {
    matmul(padded(rows), value_depth, padded(keys), s.scores, size, v.data, v.ld, s.output, value_depth, !first);
  }
}

// Rows [first, first + rows) against the key blocks of the task that they can see.
template <typename T>
void forward_block(const AttentionParams& p, ForwardScratch<T>& s, const ForwardTask& task, int64_t first,
                   int64_t rows) {
  begin_rows(p, s, task, first, rows);
  bool untouched = true;
  for (int64_t block = task.first_key_block; block < task.last_key_block; ++block) {
    const TileKind kind = select_keys(p, s.heads, s.heads_count, block * s.blocks.size, s.blocks.keys_of(block));
    if (kind == TileKind::empty) continue;
    s.visited[block] = 1;
    forward_tile(p, s, rows, kind, block, untouched);
    untouched = false;
  }
  if (untouched) fill(s.output, rows * s.blocks.value_depth, T(0));
}

// What a task that saw only part of the keys leaves: for each row m, l and O, of width 2 + Dv.
template <typename T>
T* part_of(const AttentionParams& p, const Parts& parts, const ForwardTask& task, int64_t part, int64_t row) {
  const int64_t head = task.batch * p.kv_heads + task.kv_head, rows = p.group() * p.q_len;
  return static_cast<T*>(parts.memory) + ((head * parts.count + part) * rows + row) * (2 + padded(p.value_dim));
}

template <typename T>
void store_part(const AttentionParams& p, const Parts& parts, const ForwardTask& task, const ForwardScratch<T>& s,
                int64_t first, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    T* dst = part_of<T>(p, parts, task, task.part, first + r);
    dst[0] = s.rows[r].maximum;
    dst[1] = s.rows[r].sum;
    std::memcpy(dst + 2, s.output + r * s.blocks.value_depth, s.blocks.value_depth * sizeof(T));
  }
}

// m, l and O of a block of rows from all parts, in their order: the same bits whichever thread does it.
template <typename T>
void merge_parts(const AttentionParams& p, const Parts& parts, const ForwardTask& task, ForwardScratch<T>& s,
                 int64_t first, int64_t rows) {
  const int64_t depth = s.blocks.value_depth;
  for (int64_t r = 0; r < rows; ++r) {
    T* output = s.output + r * depth;
    fill(output, depth, T(0));
    SoftmaxRow<T>& row = s.rows[r];
    row = {};
    for (int64_t i = 0; i < parts.count; ++i) {
      const T maximum = part_of<T>(p, parts, task, i, first + r)[0];
      row.maximum = maximum > row.maximum ? maximum : row.maximum;
    }
    for (int64_t i = 0; i < parts.count; ++i) {
      const T* part = part_of<T>(p, parts, task, i, first + r);
      if (part[1] == T(0)) continue;  // it saw no key of this row
      const T factor = exp2_scalar<T>((part[0] - row.maximum) * kLog2e<T>);
      row.sum += part[1] * factor;
      for (int64_t d = 0; d < depth; d += kWidth<T>) store(output + d, load(output + d) + load(part + 2 + d) * factor);
    }
  }
}

// The mean of the weights is summed in the order of the heads: the task takes its queries through all of them.
template <typename T>
void averaging_task(const AttentionParams& p, ForwardTask task, ForwardScratch<T>& s) {
  const int64_t step = p.tile.forward_queries;
  for (int64_t head = 0; head < p.heads; ++head) {
    task.kv_head = head / p.group();
    s.blocks.select(task.batch, task.kv_head);
    for (int64_t block = task.first_block; block < task.last_block; ++block) {
      const int64_t query = block * step;
      forward_block(p, s, task, head % p.group() * p.q_len + query, std::min(step, p.q_len - query));
      finish_rows(p, s, s.heads[0]);
    }
  }
}

template <typename T>
void forward_task(const AttentionParams& p, const ForwardTask& task, const Parts& parts, ForwardScratch<T>& s) {
  if (p.average_weights) return averaging_task(p, task, s);
  s.blocks.select(task.batch, task.kv_head);
  const int64_t step = p.tile.forward_queries, all = p.rows();
  for (int64_t block = task.first_block; block < task.last_block; ++block) {
    const int64_t first = block * step, rows = std::min(step, all - first);
    forward_block(p, s, task, first, rows);
    if (parts.count > 1) {
      store_part(p, parts, task, s, first, rows);
      const int64_t before = parts.finished[task.batch * p.kv_heads + task.kv_head].fetch_add(1);
      if (before + 1 < parts.count) continue;
      merge_parts(p, parts, task, s, first, rows);
    }
    for (int64_t h = 0; h < s.heads_count; ++h) finish_rows(p, s, s.heads[h]);
  }
}

}  // namespace
}  // namespace mha_ext::cpu
