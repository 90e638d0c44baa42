// Tensors whose memory is elsewhere, or not there yet.
#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::shard {

// Contiguous, over a storage of its own that has a size and no memory: who copies from there
// without asking gets an error, where one of no size would give nothing, in silence.
at::Tensor tensor_without_memory(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace lockstep::shard
