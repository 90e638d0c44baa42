#include <lockstep/plan/model_states.h>

#include <cmath>

#include <lockstep/base/error.h>
#include <lockstep/plan/precision.h>

namespace lockstep::plan {

ModelStates estimate_memory(double params_b, std::string_view precision,
                            const ModelStateOptions& options) {
  if (!std::isfinite(params_b) || params_b <= 0)
    throw UsageError("a model of {} billion parameters: give a number above 0, as 7 or 0.124",
                     params_b);
  if (options.num_ranks < 1)
    throw UsageError("the number of ranks is {}: give at least 1", options.num_ranks);
  const Precision computed = precision_named(precision);
  const double parameters = params_b * 1e9;
  const bool cuts_weights = cuts_parameters(options.strategy);
  const auto divided = [&](bool cut) { return cut ? parameters / options.num_ranks : parameters; };
  const double element = static_cast<double>(bytes_of(computed));
  const bool has_master =
      computed != Precision::fp32 && options.master_weights == MasterWeights::fp32;

  ModelStates states{
      .weights = element * divided(cuts_weights),
      .gradients = element * divided(cuts_gradients(options.strategy)),
      .optimizer = (has_master ? 12 : 8) * divided(cuts_optimizer(options.strategy))};
  if (options.offload == Offload::none) return states;
  states.host = states.optimizer;
  states.optimizer = 0;
  if (options.offload == Offload::optimizer_and_parameters && cuts_weights) {
    states.host += states.weights;
    states.weights = 0;
  }
  return states;
}

}  // namespace lockstep::plan
