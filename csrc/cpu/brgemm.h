// Whether the tile products of the kernels can run in oneDNN's brgemm on this machine.
#pragma once

namespace mha_ext::cpu {

bool brgemm_available();

}  // namespace mha_ext::cpu
