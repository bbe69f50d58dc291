#pragma once

namespace mha_ext::cpu {

// Whether the float32 tile products of the kernels run in oneDNN's brgemm: where this machine has it, unless the
// environment variable MHA_EXT_TILE_PRODUCTS=own asks for the kernels' own.
bool brgemm_available();

}  // namespace mha_ext::cpu
