// Two operators of LibTorch's under autocast on CUDA, as kernels of ours: models of plain torch::nn
// get them without a change.
//
// - add_(values, bias), where values are of autocast's type, contiguous, and the bias one vector of
//   floats: torch::nn::Linear adds its bias so to inputs of more than two dims. LibTorch adds two
//   types element by element, which takes several times as long as reading and writing the memory.
//   The sums are LibTorch's to the bit; the bias's gradient is summed and kept in float.
// - cross_entropy_loss(logits [rows, classes], targets [rows]), which torch::nn::CrossEntropyLoss
//   and its functional form call. LibTorch rounds the log-softmax to the logits' type, makes floats
//   of it and goes over these many times; here losses are computed in float from the logits, and
//   one pass of backward makes the gradient, of the logits' type. The logits stay as they are and
//   are kept for backward: autograd refuses it after a change of them in place.
//
// Both know no_grad, second derivatives and every reduction. What else these operators are called
// with goes to LibTorch's kernels as before: other types, shapes and devices, weights of classes,
// label smoothing, targets that are probabilities, few classes, forward-mode
// derivatives, and tensors that are cut over ranks.
#pragma once

namespace lockstep::nn {

// Registers the two under autocast's dispatch key on CUDA, where LibTorch has no functions for
// them: an operator for which LibTorch, or another library of the process, has one keeps that. It
// is for the whole process and until it ends; only calls under autocast on CUDA ever come to them.
// Does nothing the second time, and in builds whose LibTorch has no CUDA. Threading: any.
//
// setup_distributed() calls it where ranks have GPUs, unless DistributedConfig::autocast_operators
// is false.
void register_autocast_operators();

}  // namespace lockstep::nn
