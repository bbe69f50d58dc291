// The one struct between the operators and the kernels: raw pointers, sizes and strides, no Tensor.
#pragma once

#include <atomic>
#include <cstdint>

namespace mha_ext::cpu {

enum class Dtype : uint8_t { f32, f64, bf16, f16, boolean };

constexpr int64_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64: return 8;
    case Dtype::f32: return 4;
    case Dtype::boolean: return 1;
    default: return 2;
  }
}

// A 4-D operand (batch, head, row, column); strides in elements, 0 where it is broadcast. data is null when absent.
struct View {
  void* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
  Dtype dtype = Dtype::f32;

  explicit operator bool() const { return data != nullptr; }
  int64_t offset(int64_t b, int64_t h, int64_t row, int64_t column) const {
    return b * stride[0] + h * stride[1] + row * stride[2] + column * stride[3];
  }
};

// Rows and columns of the score tiles; see tile_size.h.
struct TileSize {
  int64_t forward_queries, forward_keys;
  int64_t backward_queries, backward_keys;
};

struct Dropout {
  bool active = false;
  bool drops_all = false;   // p == 1
  int32_t threshold = 0;    // keep where the upper 31 random bits are >= threshold
  double keep_scale = 1.0;  // 1 / (1 - p), 0 when all is dropped
  uint32_t seed_low = 0, seed_high = 0;
};

struct AttentionParams {
  int64_t batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim;
  double scale;
  View query, key, value;                // (B, H, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv)
  View mask, bias;                       // (B, H, Lq, Lk), broadcast by zero strides
  const int64_t* key_lengths = nullptr;  // (B,)
  bool is_causal = false;
  int64_t causal_offset = 0;       // query i sees keys j <= i + causal_offset
  bool uniform_dead_rows = false;  // rows that see no key: weights 1 / Lk instead of 0
  double softcap = 0;              // c of c tanh(S / c); 0: none
  bool average_weights = false;    // weights are their mean over the heads, (B, 1, Lq, Lk) with stride 0
  bool weights_before_dropout = false;
  bool few_rows = false;  // too few rows share a key head for copies of keys and values to pay
  Dropout dropout;
  TileSize tile;
  View output, weights, logsumexp;  // (B, H, Lq, Dv), (B, H, Lq, Lk) or absent, (B, H, Lq, 1) or absent

  int64_t group() const { return heads / kv_heads; }
  // The rows that are numbered through and cut into blocks: those of all query heads that share a key head, or of one
  // head if a task visits all of them.
  int64_t rows() const { return average_weights ? q_len : group() * q_len; }
  int64_t row_blocks() const { return (rows() + tile.forward_queries - 1) / tile.forward_queries; }
  int64_t forward_key_blocks() const { return (kv_len + tile.forward_keys - 1) / tile.forward_keys; }
  bool hides_anything() const { return mask || bias || key_lengths || is_causal; }
  // Keys at and beyond this one are hidden from every query of the batch entry.
  int64_t key_limit(int64_t b) const { return key_lengths ? key_lengths[b] : kv_len; }
};

struct BackwardParams : AttentionParams {
  // As output, weights, logsumexp; the last two may be absent. With grad_weights but no weights (they were averaged)
  // the weights are computed again.
  View grad_output, grad_weights, grad_logsumexp;
  View grad_query, grad_key, grad_value;
  View grad_bias;  // accumulator (fp32, or fp64 for double) of bias's own shape, zeroed, broadcast by zero strides

  // Whether delta needs the weights, which were not kept.
  bool sums_weights() const { return grad_weights && !weights; }
  int64_t query_blocks() const { return (q_len + tile.backward_queries - 1) / tile.backward_queries; }
  int64_t key_blocks() const { return (kv_len + tile.backward_keys - 1) / tile.backward_keys; }
};

// Forward work: row blocks [first, last) of the row_blocks() that share one key/value head, against all blocks of keys
// or, when there are few rows, against one part of them. With average_weights: row blocks of every head.
struct ForwardTask {
  int64_t batch, kv_head, first_block, last_block, first_key_block, last_key_block, part;
};

// Where tasks that share the few rows of a key head leave their parts; the last to finish puts them together, in order.
struct Parts {
  int64_t count = 1;                         // of each head; 1: nothing is shared
  void* memory = nullptr;                    // (B * Hkv, count, rows, width)
  std::atomic<int64_t>* finished = nullptr;  // (B * Hkv)
};

// Backward work: key blocks [first, last) of the key/value heads [kv_head, kv_head_end) of batches [batch, batch_end).
// More than one head only where they add into the same grad_bias. With few rows the blocks are those of the forward.
struct BackwardTask {
  int64_t batch, batch_end, kv_head, kv_head_end, first_block, last_block;
  int64_t part = 0;
};

// dQ is summed over key blocks in ascending order, whichever threads work on them: progress[head * key_blocks + k]
// counts the query blocks that key block k has passed; k adds into query block i only after k - 1 has passed it.
struct GradQueryOrder {
  void* accumulator = nullptr;  // (B * H, query blocks, D, block queries), null: one task per head, no waiting
  std::atomic<int64_t>* progress = nullptr;    // (B * H, key blocks)
  const std::atomic<bool>* stopped = nullptr;  // another thread has failed: do not wait for it
  Parts parts;                                 // of few rows instead: dQ / scale, width D
};

}  // namespace mha_ext::cpu
