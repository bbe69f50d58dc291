// Sizes of the score tiles and paddings, each with its reason. The measurements are those of CONTRIBUTING.md's section
// on tile sizes; `mha_ext._C.set_tile_size` overrides those of attention for tests and tuning.
#pragma once

#include "attention_params.h"

namespace mha_ext::cpu {

// Every scratch matrix is padded with zeros to a multiple of this many columns: one AVX-512 vector of floats, so no
// inner loop has a tail and the tile product meets few distinct shapes (oneDNN compiles a kernel for each).
constexpr int64_t kLanes = 16;

constexpr int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Forward 64 x 256: the score tile (64 KB in fp32) with its K^T, V and O blocks (64 + 64 + 16 KB at D = 64) stays in a
// 512 KB L2; 256 keys amortise the rescaling of O, and 64 queries the reading of K^T and V.
// Backward 64 x 128: P^T and dS^T (32 KB each) and the seven operand blocks stay in L2; 128 keys halve the traffic of
// the dQ block, which is read and written once per tile.
constexpr TileSize kDefaultTile = {64, 256, 64, 128};

// Rows of a block so that few blocks waste little: 65 rows are one block of 80 rather than two of 64. At most 7/4 of
// `step`, for which the sizes above still hold.
constexpr int64_t balanced(int64_t rows, int64_t step) {
  if (rows <= step || rows >= 8 * step) return step;
  int64_t best = step, least = (rows + step - 1) / step * step;
  for (int64_t block = padded(step / 2 + 1); block <= step * 7 / 4; block += kLanes) {
    const int64_t computed = (rows + block - 1) / block * block;
    if (computed < least) {
      best = block;
      least = computed;
    }
  }
  return best;
}

// A few rows (few_rows.h) meet so many keys in a task: 512 KB of keys and values at D = 128, some 20 us, so that one
// head with a long cache still keeps all threads busy.
constexpr int64_t kPartKeys = 512;

// Tiles of the projections (linear.h): a block of w^T (512 x 64, 128 KB in fp32), one of x (128 x 512, 256 KB) and the
// result's tile (32 KB) share an L2 of 512 KB. Shorter depths read and write the result more often: 256 costs 2 %.
constexpr int64_t kLinearRows = 128, kLinearColumns = 64, kLinearDepth = 512;
// A task copies its block of w^T once for so many rows at most: with them x (2 MB at 512 features) is still in a cache
// that threads share when the next block of columns wants it.
constexpr int64_t kLinearTaskRows = 1024;
// Of so few rows x^T is copied rather than w^T: 20 rows of 512 features take 0.32 ms for a layer's forward rather than
// 0.39, 33 to 64 rows the same or less the other way.
constexpr int64_t kFewLinearRows = 32;
static_assert(kFewLinearRows <= kLinearRows);  // one task has all of them

}  // namespace mha_ext::cpu
