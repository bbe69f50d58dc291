// What the files compiled per instruction set offer: one table of functions each.
#pragma once

#include "attention_params.h"
#include "linear_params.h"

#include <cstddef>

namespace mha_ext::cpu {

// Tasks that the threads of one parallel region take in ascending order.
template <typename Task>
struct TaskQueue {
  const Task* tasks;
  int64_t count;
  std::atomic<int64_t> next{0};
  std::atomic<bool> stopped{false};  // set when a thread has failed
};

// Functions for one accumulation type. A worker is run by each thread and works until the queue is empty; scratch holds
// as many bytes as the function before it says.
struct Kernels {
  int64_t (*forward_scratch_bytes)(const AttentionParams&);
  void (*forward_worker)(const AttentionParams&, TaskQueue<ForwardTask>&, const Parts&, std::byte* scratch);
  int64_t (*backward_scratch_bytes)(const BackwardParams&, const GradQueryOrder&, int64_t task_key_blocks);
  void (*backward_worker)(const BackwardParams&, TaskQueue<BackwardTask>&, const GradQueryOrder&,
                          int64_t task_key_blocks, std::byte* scratch);
  double (*multiply_add)(int64_t iterations);  // see peak.h
  int64_t peak_operations;                     // of one iteration
};

struct KernelTable {
  const char* name;  // default, avx2, avx512
  int64_t few_rows;  // up to so many rows of the forward do without packed keys and values
  Kernels f32, f64;
  int64_t (*linear_scratch_bytes)();  // fp32, where oneDNN's brgemm runs
  void (*linear_worker)(const LinearProduct*, TaskQueue<LinearTask>&, std::byte* scratch);
};

// One per instruction set, defined by kernel_table.cpp.
extern const KernelTable kernel_table_default;
extern const KernelTable kernel_table_avx2;
extern const KernelTable kernel_table_avx512;

}  // namespace mha_ext::cpu
