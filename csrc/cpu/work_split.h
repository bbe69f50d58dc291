// How a call is cut into tasks, in the order in which threads take them: the long ones first, so that all threads end
// at about the same time.
#pragma once

#include "kernels/attention_params.h"
#include "kernels/linear_params.h"

#include <vector>

namespace mha_ext::cpu {

struct ForwardSplit {
  std::vector<ForwardTask> tasks;
  int64_t parts;  // of the keys of each head, which tasks share
};

// Rows that share keys and values stay in one task as far as four tasks for each thread allow: a task packs K and V.
ForwardSplit split_forward(const AttentionParams& p, int64_t threads);

struct BackwardSplit {
  std::vector<BackwardTask> tasks;
  int64_t task_key_blocks;
  int64_t parts;  // with few rows, of the keys of each head
  bool ordered;   // several tasks add into one dQ: see GradQueryOrder
};

// All heads that add into one grad_bias share a task. Key blocks are split when there are few tasks otherwise.
BackwardSplit split_backward(const BackwardParams& p, int64_t threads);

// Blocks of every product, of one size: smaller ones where there are few of them for so many threads.
std::vector<LinearTask> split_linear(const std::vector<LinearProduct>& products, int64_t threads);

}  // namespace mha_ext::cpu
