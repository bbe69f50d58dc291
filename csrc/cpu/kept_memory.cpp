#include "kept_memory.h"

#include "environment.h"

#include <c10/core/CPUAllocator.h>

#ifdef __linux__
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <fstream>
#include <mutex>
#endif

namespace mha_ext::cpu {

#ifdef __linux__
namespace {

constexpr size_t kKilobyte = 1 << 10, kMegabyte = 1 << 20;

// malloc itself keeps what is smaller.
constexpr size_t kLeastBytes = 128 * kKilobyte;

// Memory that so many others came after is given back: no step of a training that goes on has wanted it.
constexpr int64_t kLongestWait = 4096;

// In front of a tensor's memory.
struct alignas(64) Block {
  size_t size;    // of all that was mapped, this header included
  int64_t freed;  // how many blocks had been freed before it
};

// Sizes are few, so that tensors of about the same size find each other's memory.
size_t mapped_size(size_t bytes) {
  const size_t step = bytes < 32 * kMegabyte ? 64 * kKilobyte : 2 * kMegabyte;
  return (bytes + sizeof(Block) + step - 1) / step * step;
}

Block* map_block(size_t size) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
  if (size >= 16 * kMegabyte) madvise(memory, size, MADV_HUGEPAGE);  // pages of 2 MB, or refused: it stays as it is
#endif
  auto* block = static_cast<Block*>(memory);
  block->size = size;
  return block;
}

void unmap_block(Block* block) { munmap(block, block->size); }

size_t default_most_kept() {
  auto memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t limit = 0;  // of a container
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit) memory = std::min(memory, limit);
  return std::min(256 * kMegabyte, memory / 32);
}

class KeptMemory final : public c10::Allocator {
 public:
  // Never destroyed: tensors may outlive every static object.
  static KeptMemory& instance() {
    static auto* memory = [] {
      auto* made = new KeptMemory(environment_number("MHA_EXT_KEEP_MB", 0, 1 << 20));
      // A child must not wait for a thread that it does not have.
      constexpr auto unlock = [] { instance().mutex_.unlock(); };
      pthread_atfork([] { instance().mutex_.lock(); }, unlock, unlock);
      return made;
    }();
    return *memory;
  }

  c10::DataPtr allocate(size_t bytes) override {
    Block* block = nullptr;
    if (bytes <= PTRDIFF_MAX / 2) {  // storage may be resized to any number
      const size_t size = mapped_size(bytes);
      block = take(size);
      if (!block) block = map_block(size);
      if (!block) {
        release();
        block = map_block(size);
      }
    }
    if (!block) return c10::GetCPUAllocator()->allocate(bytes);  // which says why there is none
    void* data = block + 1;
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &free, c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  size_t most() const { return most_; }

  size_t kept() {
    const std::lock_guard lock(mutex_);
    return kept_;
  }

  void release() {
    const std::lock_guard lock(mutex_);
    while (!blocks_.empty()) unmap_oldest();
  }

 private:
  explicit KeptMemory(std::optional<int64_t> megabytes)
      : most_(megabytes ? static_cast<size_t>(*megabytes) * kMegabyte : default_most_kept()) {}

  static void free(void* data) {
    c10::profiledCPUMemoryReporter().Delete(data);
    instance().keep(static_cast<Block*>(data) - 1);
  }

  // The best fit, at most a quarter too large; among equals the one that was freed last, as caches may still have it.
  Block* take(size_t size) {
    const std::lock_guard lock(mutex_);
    auto best = blocks_.end();
    for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
      const size_t found = (*block)->size;
      if (found >= size && found - size <= size / 4 && (best == blocks_.end() || found <= (*best)->size)) best = block;
    }
    if (best == blocks_.end()) return nullptr;
    Block* block = *best;
    blocks_.erase(best);
    kept_ -= block->size;
    return block;
  }

  void keep(Block* block) {
    if (block->size > most_) return unmap_block(block);
    const std::lock_guard lock(mutex_);
    block->freed = freed_++;
    blocks_.push_back(block);
    kept_ += block->size;
    while (kept_ > most_ || freed_ - blocks_.front()->freed > kLongestWait) unmap_oldest();
  }

  void unmap_oldest() {
    kept_ -= blocks_.front()->size;
    unmap_block(blocks_.front());
    blocks_.pop_front();
  }

  const size_t most_;
  std::mutex mutex_;
  std::deque<Block*> blocks_;  // in the order in which they were freed
  size_t kept_ = 0;
  int64_t freed_ = 0;
};

}  // namespace

c10::Allocator& allocator_for(size_t bytes) {
  if (bytes < kLeastBytes || KeptMemory::instance().most() == 0) return *c10::GetCPUAllocator();
  return KeptMemory::instance();
}

size_t kept_bytes() { return KeptMemory::instance().kept(); }

size_t most_kept_bytes() { return KeptMemory::instance().most(); }

void release_kept_memory() { KeptMemory::instance().release(); }

#else  // no mmap, or one that was not tried

c10::Allocator& allocator_for(size_t) { return *c10::GetCPUAllocator(); }

size_t kept_bytes() { return 0; }

size_t most_kept_bytes() { return 0; }

void release_kept_memory() {}

#endif

}  // namespace mha_ext::cpu
