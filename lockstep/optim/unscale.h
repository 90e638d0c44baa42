// Gradients of a scaled loss, made those of the loss itself.
#pragma once

#include <vector>

#include <lockstep/optim/parameter.h>

namespace lockstep::optim {

// Divides every gradient by `scale`, in place, and tells whether one of them is inf or nan then: a
// Float tensor of one element on the first parameter's device (the CPU where there is none), 1 if
// so and 0 if not. Float, Double, Half and BFloat16, each divided as if by itself: a gradient whose
// memory another one uses too, or that leaves gaps in it, gets memory of its own first. On the CPU
// one pass over memory; elsewhere nothing waits for the device. UsageError for parameters that
// check_distinct or gradient_of refuses and for other types, with all gradients as they were.
at::Tensor unscale_gradients(const std::vector<NamedParameter>& parameters, double scale);

// The same with LibTorch's operators alone, for gradients on one device that share no memory: how
// it is done where there are no loops of our own.
at::Tensor unscale_with_operators(const std::vector<at::Tensor>& gradients, double scale);

}  // namespace lockstep::optim
