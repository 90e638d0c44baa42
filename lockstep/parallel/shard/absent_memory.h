// Tensors whose memory is elsewhere, or not there yet.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::shard {

// Contiguous, over a storage of its own that has no bytes.
at::Tensor tensor_without_memory(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace lockstep::shard
