// What a function that is recomputed saves for backward, in order, and the results that it keeps.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

#include <lockstep/recompute/generator_states.h>
#include <lockstep/recompute/kept_tensor.h>
#include <lockstep/recompute/view.h>

namespace lockstep::activations {

// A tensor that was saved.
struct Slot {
  c10::DimVector sizes;
  c10::ScalarType dtype{};
  bool wanted = true;   // its node is there and may ask for it
  at::Tensor tensor{};  // between the second run and when its node takes it
  KeptTensor kept{};    // of an operation whose result is kept: what it made for itself
  // And what it saved of its arguments: which, and the part of its storage.
  std::size_t argument = 0;
  std::optional<View> part{};

  bool recomputed() const { return !kept.defined(); }
};

struct KeptResult {
  std::size_t first_slot;
  std::size_t end_slot;
  KeptTensor result;  // none where the function then changed it: it is computed again
  bool requires_grad;
  std::optional<GeneratorStates> generators;  // after an operation that may draw random numbers
};

}  // namespace lockstep::activations
