// The kernels for the instruction set in use, and the tile sizes.
#pragma once

#include "kernels/kernel_table.h"

#include <ATen/core/Tensor.h>

namespace mha_ext::cpu {

// The table for the best instruction set that this machine, this build and ATEN_CPU_CAPABILITY allow; chosen once.
const KernelTable& kernel_table();

// Its functions for the accumulation type of a dtype: fp64 for double, else fp32.
const Kernels& kernels_for(at::ScalarType dtype);

// Multiplies and adds in all threads for `iterations` turns; returns the floating-point operations that were.
double multiply_add(int64_t iterations);

// Rows and columns of the score tiles, positive multiples of 16. Setting them is for tests and tuning, and not safe
// while another thread runs an operator.
TileSize tile_size();
void set_tile_size(const TileSize& tile);

}  // namespace mha_ext::cpu
