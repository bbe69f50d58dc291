// Memory of large results and of what lies between two steps, kept for the calls to come. The C library would give it
// back to the system with every tensor that is freed, and fresh pages cost a fault and are zeroed: a tenth of the time
// of a layer that returns its weights, up to a twentieth of that of a training step.
#pragma once

#include <c10/core/Allocator.h>

namespace mha_ext::cpu {

// For a tensor of so many bytes: this memory if it is large, PyTorch's allocator if not, or where nothing is kept.
c10::Allocator& allocator_for(size_t bytes);

// Bytes that are kept now and belong to no tensor, and how many that may be: MHA_EXT_KEEP_MB, or 256 MB, or a 32nd of
// the machine's or the container's memory if that is less.
size_t kept_bytes();
size_t most_kept_bytes();

// Gives all of it back to the system.
void release_kept_memory();

}  // namespace mha_ext::cpu
