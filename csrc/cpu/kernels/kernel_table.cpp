// The one source compiled once per instruction set (cmake/Isa.cmake passes MHA_EXT_ISA and the -m flags). Everything it
// includes lives in anonymous namespaces, so that no 512-bit code is shared with an older machine's.
#include "kernel_table.h"

#include "backward.h"
#include "backward_few_rows.h"
#include "forward.h"
#include "linear.h"
#include "peak.h"

#define MHA_EXT_JOIN_(a, b) a##b
#define MHA_EXT_JOIN(a, b) MHA_EXT_JOIN_(a, b)
#define MHA_EXT_STRING_(a) #a
#define MHA_EXT_STRING(a) MHA_EXT_STRING_(a)

namespace mha_ext::cpu {
namespace {

template <typename Task>
const Task* take(TaskQueue<Task>& queue) {
  if (queue.stopped.load(std::memory_order_relaxed)) return nullptr;
  const int64_t i = queue.next.fetch_add(1, std::memory_order_relaxed);
  return i < queue.count ? queue.tasks + i : nullptr;
}

template <typename T>
int64_t forward_scratch_bytes(const AttentionParams& p) {
  Workspace measure(nullptr);
  ForwardScratch<T> scratch(p, measure);
  return measure.used();
}

template <typename T>
void forward_worker(const AttentionParams& p, TaskQueue<ForwardTask>& queue, const Parts& parts, std::byte* memory) {
  Workspace workspace(memory);
  ForwardScratch<T> scratch(p, workspace);
  while (const ForwardTask* task = take(queue)) forward_task(p, *task, parts, scratch);
}

// visit(task, batch, kv_head) for each key head of each task
template <typename Visit>
void visit_key_heads(TaskQueue<BackwardTask>& queue, const Visit& visit) {
  while (const BackwardTask* task = take(queue)) {
    for (int64_t batch = task->batch; batch < task->batch_end; ++batch) {
      for (int64_t kv_head = task->kv_head; kv_head < task->kv_head_end; ++kv_head) visit(*task, batch, kv_head);
    }
  }
}

template <typename T>
int64_t backward_scratch_bytes(const BackwardParams& p, const GradQueryOrder& order, int64_t task_key_blocks) {
  Workspace measure(nullptr);
  if (p.few_rows) {
    FewRowsBackwardScratch<T> scratch(p, measure);
  } else {
    BackwardScratch<T> scratch(p, order, task_key_blocks, measure);
  }
  return measure.used();
}

template <typename T>
void backward_worker(const BackwardParams& p, TaskQueue<BackwardTask>& queue, const GradQueryOrder& order,
                     int64_t task_key_blocks, std::byte* memory) {
  Workspace workspace(memory);
  if (p.few_rows) {
    FewRowsBackwardScratch<T> scratch(p, workspace);
    visit_key_heads(queue, [&](const BackwardTask& task, int64_t batch, int64_t kv_head) {
      few_rows_backward(p, task, order.parts, scratch, batch, kv_head);
    });
    return;
  }
  BackwardScratch<T> scratch(p, order, task_key_blocks, workspace);
  visit_key_heads(queue, [&](const BackwardTask& task, int64_t batch, int64_t kv_head) {
    backward_kv_head(p, task, order, scratch, batch, kv_head);
  });
}

int64_t linear_scratch_bytes() {
  Workspace measure(nullptr);
  LinearScratch scratch(measure);
  return measure.used();
}

void linear_worker(const LinearProduct* products, TaskQueue<LinearTask>& queue, std::byte* memory) {
  Workspace workspace(memory);
  LinearScratch scratch(workspace);
  while (const LinearTask* task = take(queue)) linear_task(products[task->product], *task, scratch);
}

template <typename T>
constexpr Kernels kernels() {
  return {forward_scratch_bytes<T>, forward_worker<T>, backward_scratch_bytes<T>,
          backward_worker<T>,       multiply_add<T>,   kPeakOperations<T>};
}

}  // namespace

const KernelTable MHA_EXT_JOIN(kernel_table_, MHA_EXT_ISA) = {
    MHA_EXT_STRING(MHA_EXT_ISA), kFewRows, kernels<float>(), kernels<double>(), linear_scratch_bytes, linear_worker};

}  // namespace mha_ext::cpu
