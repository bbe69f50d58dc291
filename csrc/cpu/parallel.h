// The only file with threads: one parallel region in which each thread runs a worker on a shared task queue.
#pragma once

#include "kernels/kernel_table.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <memory>

namespace mha_ext::cpu {

// Scratch memory of the calling thread, kept between calls (fresh pages cost more than small problems do) unless large.
class ThreadScratch {
 public:
  explicit ThreadScratch(int64_t bytes) {
    if (bytes > size()) {
      release();
      memory() = c10::alloc_cpu(bytes);
      size() = bytes;
    }
  }
  ~ThreadScratch() {
    if (size() > kKeptBytes) release();
  }
  ThreadScratch(const ThreadScratch&) = delete;
  ThreadScratch& operator=(const ThreadScratch&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(memory()); }

 private:
  static constexpr int64_t kKeptBytes = 16 << 20;

  struct Buffer {
    void* memory = nullptr;
    int64_t size = 0;
    ~Buffer() { c10::free_cpu(memory); }
  };
  static Buffer& buffer() {
    static thread_local Buffer b;
    return b;
  }
  static void*& memory() { return buffer().memory; }
  static int64_t& size() { return buffer().size; }
  static void release() {
    c10::free_cpu(memory());
    memory() = nullptr;
    size() = 0;
  }
};

// Threads worth starting for so many floating-point operations: below about 1e5 for each, waking them costs more.
inline int64_t useful_threads(double flops) {
  if (at::in_parallel_region()) return 1;
  return std::clamp<int64_t>(static_cast<int64_t>(flops / 1e5), 1, at::get_num_threads());
}

// worker(scratch) in each of at most `threads` threads, until the queue is empty. If one throws, the others stop early
// and the exception arrives here.
template <typename Task, typename Worker>
void run_workers(int64_t threads, TaskQueue<Task>& queue, int64_t scratch_bytes, const Worker& worker) {
  at::parallel_for(0, std::min(threads, queue.count), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      try {
        const ThreadScratch scratch(scratch_bytes);
        worker(scratch.data());
      } catch (...) {
        queue.stopped = true;
        throw;
      }
    }
  });
}

}  // namespace mha_ext::cpu
