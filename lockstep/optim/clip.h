// Clipping by the global norm of all gradients.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/optim/parameters.h>

namespace lockstep::optim {

struct ClipResult {
  double norm = 0;  // before clipping
  bool finite = true;
  bool clipped = false;
};

// Tells a norm about other ranks that have further parameters of the same model, or further parts
// of these: the layers of other stages, or the parts that a tensor axis cut.
struct NormScope {
  // Whether this rank answers for a parameter: of several ranks that have the same, one does.
  std::function<bool(const std::string& parameter)> counts = nullptr;  // all
  // The sum of all of these ranks' numbers, one Double each.
  std::function<at::Tensor(const at::Tensor&)> sum = nullptr;  // of this one's
  // Whether a parameter here is a part of a larger one, of which other ranks have the rest.
  bool cuts_parameters = false;

  bool counts_parameter(const std::string& name) const { return !counts || counts(name); }
  at::Tensor norm(const at::Tensor& sum_of_squares) const;
};

// The root of the sum of squares over every gradient, as one Double: blocks of each parameter, then
// parameters, added in order, so that the bits depend on neither threads nor device
// (optim/sum_of_squares.h). It is where the parameters are, if that is a GPU, and nothing waits for
// it. Parameters without a gradient count as 0. UsageError for parameters that check_distinct or
// gradient_of refuses. `device` is where the ranks of a scope have their model, all of them the
// same kind: a rank may have no parameters to show for it.
at::Tensor gradient_norm(const std::vector<NamedParameter>& parameters, const NormScope& scope = {},
                         std::optional<c10::Device> device = std::nullopt);

// For Optimizer::step(), what clip_gradients() multiplies gradients of such a norm by, and 0 where
// the norm is not finite, so that the step is left out. On the norm's device; nothing waits.
// UsageError for a max_norm below 0 or not a number.
//
//   optimizer->step(learning_rate, StepFactor(clip_factor(gradient_norm(parameters), 1.0)));
at::Tensor clip_factor(const at::Tensor& norm, double max_norm);

// DeepSpeed's rule: c = (norm + 1e-6) / max_norm, and where c > 1 gradients are divided by c, in
// place. A max_norm of 0 only measures. A norm that is not finite changes no gradient: that step is
// the caller's to skip. UsageError for a max_norm below 0 or not a number.
ClipResult clip_gradients(const std::vector<NamedParameter>& parameters, double max_norm,
                          const NormScope& scope = {},
                          std::optional<c10::Device> device = std::nullopt);

// Its parts, for gradients whose norm is known otherwise.
void check_max_norm(double max_norm);
ClipResult clip_to(double norm, const std::vector<at::Tensor>& gradients, double max_norm);

}  // namespace lockstep::optim
