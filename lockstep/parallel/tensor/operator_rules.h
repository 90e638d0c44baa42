// What becomes of an operator that is called on tensors that are cut.
#pragma once

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>

namespace lockstep::tensor {

enum class Rule : std::uint8_t {
  gather,          // needs all of them: whatever is not one of the following
  product,         // with a matrix that is cut
  lookup,          // in a table that is cut
  view,            // of a part, where the cut stays one
  element_wise,    // on parts, where all are cut alike
  make_alike,      // another of the same sizes
  draw,            // random numbers in place, as many as the whole takes; this rank's are kept
  dropout,         // the same
  norm,            // of all elements, from the parts'
  made_of_others,  // which come here one by one
  metadata,        // sees no element
  new_memory,      // of a parameter
  refused,
};

Rule rule_of(const c10::OperatorHandle& op);

}  // namespace lockstep::tensor
