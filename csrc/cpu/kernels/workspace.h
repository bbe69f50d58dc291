// Scratch memory of one thread, carved by a struct's constructor: run once on an empty Workspace to learn the size,
// once on real memory to get the pointers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mha_ext::cpu {
namespace {

class Workspace {
 public:
  explicit Workspace(std::byte* base) : base_(base) {}

  // count elements, aligned to a cache line and set off by one more, so that equal sizes do not share cache sets.
  template <typename T>
  T* take(int64_t count) {
    T* p = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64 + 64;
    return p;
  }

  int64_t used() const { return used_; }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

}  // namespace
}  // namespace mha_ext::cpu
