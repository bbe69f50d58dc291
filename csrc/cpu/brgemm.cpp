// oneDNN's batch-reduce GEMM through ATen, behind the plain functions of kernels/gemm.h.
#include "brgemm.h"

#include "environment.h"
#include "kernels/gemm.h"

#include <ATen/native/CPUBlas.h>

namespace mha_ext::cpu {

// fp32 brgemm needs x86 with AVX2 and a torch built with oneDNN: a small product tells.
bool brgemm_available() {
  static const bool available = [] {
    if (environment_choice("MHA_EXT_TILE_PRODUCTS", {"own", "onednn"}) == "own") return false;
    try {
      alignas(64) float a[kLanes * kLanes] = {}, b[kLanes * kLanes] = {}, c[kLanes * kLanes];
      brgemm_f32(kLanes, kLanes, kLanes, a, kLanes, b, kLanes, c, kLanes, false);
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }();
  return available;
}

void brgemm_f32(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                int64_t ldc, bool accumulate) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, accumulate, a, b, c, /*is_vnni=*/false);
}

}  // namespace mha_ext::cpu
