#include "work_split.h"

#include "kernels/tile_size.h"

#include <algorithm>
#include <utility>

namespace mha_ext::cpu {
namespace {

// Key blocks of one part when few rows meet many keys; all of them otherwise. Not a matter of threads: results depend
// on it in the last bit.
int64_t part_key_blocks(const AttentionParams& p, bool splits) {
  return p.few_rows && splits ? std::max<int64_t>(1, kPartKeys / p.tile.forward_keys)
                              : std::max<int64_t>(1, p.forward_key_blocks());
}

// Keys that the last row of a block sees.
int64_t keys_of_block(const AttentionParams& p, int64_t batch, int64_t block) {
  const int64_t limit = p.key_limit(batch);
  const int64_t last = std::min((block + 1) * p.tile.forward_queries, p.rows()) - 1;
  return p.is_causal ? std::clamp<int64_t>(last % p.q_len + p.causal_offset + 1, 0, limit) : limit;
}

int64_t parts_of(int64_t key_blocks, int64_t step) { return std::max<int64_t>(1, (key_blocks + step - 1) / step); }

int64_t cost(const AttentionParams& p, const ForwardTask& task) {
  int64_t keys = 0;
  for (int64_t block = task.first_block; block < task.last_block; ++block) keys += keys_of_block(p, task.batch, block);
  return keys;
}

void sort_by_cost(const AttentionParams& p, std::vector<ForwardTask>& tasks) {
  std::vector<std::pair<int64_t, ForwardTask>> sorted;
  sorted.reserve(tasks.size());
  for (const ForwardTask& task : tasks) sorted.emplace_back(cost(p, task), task);
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (size_t i = 0; i < tasks.size(); ++i) tasks[i] = sorted[i].second;
}

// A (batch, key head) span of backward tasks; the longest first.
struct Span {
  int64_t batch, kv_head;
};

std::vector<Span> spans_of(const BackwardParams& p, int64_t batches, int64_t kv_heads) {
  std::vector<Span> spans;
  for (int64_t b = 0; b < p.batch; b += batches) {
    for (int64_t h = 0; h < p.kv_heads; h += kv_heads) spans.push_back({b, h});
  }
  if (p.key_lengths && batches == 1) {
    std::stable_sort(spans.begin(), spans.end(),
                     [&](const Span& a, const Span& b) { return p.key_limit(a.batch) > p.key_limit(b.batch); });
  }
  return spans;
}

}  // namespace

ForwardSplit split_forward(const AttentionParams& p, int64_t threads) {
  // With the mean of the weights a task visits all heads of its rows.
  const int64_t kv_heads = p.average_weights ? 1 : p.kv_heads;
  const int64_t heads = p.batch * kv_heads, blocks = p.row_blocks(), key_blocks = p.forward_key_blocks();
  const int64_t shares = threads == 1 ? 1 : std::clamp<int64_t>((4 * threads + heads - 1) / heads, 1, blocks);
  // Weights, and rows that see every key after all, need the whole row in one task.
  const int64_t step = part_key_blocks(p, !p.weights && !p.uniform_dead_rows);
  std::vector<ForwardTask> tasks;
  for (int64_t i = 0; i < heads; ++i) {
    for (int64_t share = 0; share < shares; ++share) {
      for (int64_t key = 0; key == 0 || key < key_blocks; key += step) {
        tasks.push_back({i / kv_heads, i % kv_heads, share * blocks / shares, (share + 1) * blocks / shares, key,
                         std::min(key + step, key_blocks), key / step});
      }
    }
  }
  if (threads > 1 && (p.is_causal || p.key_lengths)) sort_by_cost(p, tasks);
  return {std::move(tasks), parts_of(key_blocks, step)};
}

BackwardSplit split_backward(const BackwardParams& p, int64_t threads) {
  const bool whole_batch = p.grad_bias && p.batch > 1 && p.grad_bias.stride[0] == 0;
  const bool all_heads = p.grad_bias && p.heads > 1 && p.grad_bias.stride[1] == 0;
  const int64_t batches = whole_batch ? p.batch : 1, kv_heads = all_heads ? p.kv_heads : 1;
  const std::vector<Span> spans = spans_of(p, batches, kv_heads);
  const auto count = static_cast<int64_t>(spans.size());
  BackwardSplit split;
  split.ordered = !p.few_rows && threads > 1 && count < 4 * threads && p.key_blocks() > 1;
  const int64_t key_blocks = p.few_rows ? p.forward_key_blocks() : p.key_blocks();
  // A part reads the whole gradient of its weights: then there is only one.
  split.task_key_blocks = split.ordered ? 1 : p.few_rows ? part_key_blocks(p, !p.grad_weights) : key_blocks;
  split.parts = p.few_rows ? parts_of(key_blocks, split.task_key_blocks) : 1;
  // Key block k of a span follows k - 1 through the queries, so of n threads in one span the last starts n steps late.
  // Two threads stay together, which keeps a thread on one head; more than that turn to other spans.
  const int64_t together = std::clamp<int64_t>(threads / 2, 1, std::max<int64_t>(1, count));
  for (int64_t first = 0; first < count; first += together) {
    for (int64_t k = 0; k < key_blocks; k += split.task_key_blocks) {
      for (int64_t i = first; i < std::min(first + together, count); ++i) {
        const auto [b, h] = spans[i];
        split.tasks.push_back({b, b + batches, h, h + kv_heads, k, std::min(k + split.task_key_blocks, key_blocks),
                               p.few_rows ? k / split.task_key_blocks : 0});
      }
    }
  }
  return split;
}

namespace {

// Rows and columns of the tasks of a product: one block of the operand that is stored transposed, as much as that
// deserves of the other.
struct LinearBlock {
  int64_t rows, columns;
};

LinearBlock linear_block(const LinearProduct& p, int64_t split) {
  switch (p.kind) {
    case LinearKind::forward: return {std::max(kLinearRows, kLinearTaskRows / split), kLinearColumns};
    case LinearKind::grad_input: return {std::max(kLinearRows / 2, kLinearTaskRows / split), kLinearColumns};
    default: break;
  }
  const int64_t rows = std::max(kLanes, kLinearRows / split);
  return {rows, std::max(kLinearColumns, padded(p.columns * kLinearRows / rows / split))};
}

std::vector<LinearTask> linear_tasks(const std::vector<LinearProduct>& products, int64_t split) {
  std::vector<LinearTask> tasks;
  for (int64_t i = 0; i < static_cast<int64_t>(products.size()); ++i) {
    const LinearProduct& p = products[i];
    const LinearBlock block = linear_block(p, split);
    for (int64_t r = 0; r < p.rows; r += block.rows) {
      for (int64_t c = 0; c < p.columns; c += block.columns) {
        tasks.push_back({i, r, std::min(r + block.rows, p.rows), c, std::min(c + block.columns, p.columns)});
      }
    }
  }
  return tasks;
}

// Whether threads that take tasks of one size end at about the same time.
bool is_balanced(int64_t tasks, int64_t threads) {
  const int64_t turns = (tasks + threads - 1) / threads;
  return 10 * turns * threads <= 11 * tasks;
}

}  // namespace

std::vector<LinearTask> split_linear(const std::vector<LinearProduct>& products, int64_t threads) {
  std::vector<LinearTask> tasks = linear_tasks(products, 1);
  for (int64_t split = 2; split <= 64; split *= 2) {
    const auto count = static_cast<int64_t>(tasks.size());
    if (threads == 1 || count >= 8 * threads || (count >= 6 * threads && is_balanced(count, threads))) break;
    tasks = linear_tasks(products, split);
  }
  return tasks;
}

}  // namespace mha_ext::cpu
