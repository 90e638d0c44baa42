// Replaces two of LibTorch's operators under autocast on CUDA with kernels of ours. Models of plain
// torch::nn use them without a change.
//
// - add_(values, bias), where values are contiguous and of autocast's type, and the bias is one
//   vector of floats: torch::nn::Linear adds its bias this way to inputs of more than two dims.
//   LibTorch adds two types element by element, which takes several times as long as reading and
//   writing the memory. The sums are LibTorch's to the bit; the bias's gradient is summed and kept
//   in float.
// - cross_entropy_loss(logits [rows, classes], targets [rows]), which torch::nn::CrossEntropyLoss
//   and its functional form call. LibTorch rounds the log-softmax to the logits' type, converts it
//   to floats and goes over these many times. Here the losses are computed in float from the
//   logits, and one pass of backward makes the gradient in the logits' type. The logits stay as
//   they are and are kept for backward: autograd refuses it after a change of them in place.
//
// Both support no_grad, second derivatives and every reduction. All other calls of these operators
// go to LibTorch's kernels as before: other types, shapes and devices, weights of classes, label
// smoothing, targets that are probabilities, few classes, forward-mode derivatives, and tensors
// that are cut over ranks.
#pragma once

namespace lockstep::nn {

// Registers the two under autocast's dispatch key on CUDA. An operator for which LibTorch, or
// another library of the process, has already registered a function there keeps it. The
// registration is for the whole process, until it ends; only calls under autocast on CUDA ever
// reach it. Does nothing the second time, or in builds whose LibTorch has no CUDA. Any thread may
// call it.
//
// setup_distributed() calls it if ranks have GPUs, unless DistributedConfig::autocast_operators is
// false.
void register_autocast_operators();

}  // namespace lockstep::nn
