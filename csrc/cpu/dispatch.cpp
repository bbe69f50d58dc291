#include "dispatch.h"

#include "kernels/tile_size.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <string_view>

namespace mha_ext::cpu {

const KernelTable& kernel_table() {
  static const KernelTable& chosen = []() -> const KernelTable& {
    [[maybe_unused]] const std::string capability = at::get_cpu_capability();  // honours ATEN_CPU_CAPABILITY, unchecked
#ifdef MHA_EXT_HAVE_AVX512
    if (capability.starts_with("AVX512") && __builtin_cpu_supports("avx512bw")) return kernel_table_avx512;
#endif
#ifdef MHA_EXT_HAVE_AVX2
    if (capability.starts_with("AVX") && __builtin_cpu_supports("avx2")) return kernel_table_avx2;
#endif
    return kernel_table_default;
  }();
  return chosen;
}

const Kernels& kernels_for(at::ScalarType dtype) {
  return dtype == at::kDouble ? kernel_table().f64 : kernel_table().f32;
}

double multiply_add(int64_t iterations) {
  const Kernels& kernels = kernel_table().f32;
  const int64_t threads = at::get_num_threads();
  std::atomic<double> sum{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) sum = sum + kernels.multiply_add(iterations);
  });
  return static_cast<double>(threads * iterations * kernels.peak_operations);
}

namespace {
TileSize current_tile = kDefaultTile;
}

TileSize tile_size() { return current_tile; }

void set_tile_size(const TileSize& tile) {
  for (int64_t n : {tile.forward_queries, tile.forward_keys, tile.backward_queries, tile.backward_keys}) {
    TORCH_CHECK_VALUE(n > 0 && n % kLanes == 0 && n <= 4096, "set_tile_size: expected a multiple of ", kLanes,
                      " from 16 to 4096, got ", n);
  }
  current_tile = tile;
}

}  // namespace mha_ext::cpu
