// Large fresh memory costs a page fault every 4 KB, which takes about as long as the arithmetic that fills it.
#pragma once

#include <ATen/core/Tensor.h>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace mha_ext::cpu {

// Asks for 2 MB pages, where the system has them, for a tensor that nothing has been written to.
inline void advise_huge_pages([[maybe_unused]] const at::Tensor& tensor) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = 2 << 20;
  if (tensor.nbytes() < 8 * page) return;
  const auto data = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
  const uintptr_t begin = (data + page - 1) / page * page, end = (data + tensor.nbytes()) / page * page;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // refused: it stays as it is
#endif
}

}  // namespace mha_ext::cpu
