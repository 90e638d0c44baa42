#include <lockstep/optim/parameter_group.h>

#include <utility>

namespace lockstep::optim {

std::vector<ParameterGroup> decay_groups(std::vector<NamedParameter> parameters,
                                         double weight_decay, DecayRule rule) {
  check_distinct(parameters);
  ParameterGroup decaying{.weight_decay = weight_decay};
  ParameterGroup free{.weight_decay = 0};
  for (NamedParameter& parameter : parameters) {
    const bool decays = rule == DecayRule::everything || parameter.tensor.dim() >= 2;
    (decays ? decaying : free).parameters.push_back(std::move(parameter));
  }
  std::vector<ParameterGroup> groups;
  for (ParameterGroup* group : {&decaying, &free})
    if (!group->parameters.empty()) groups.push_back(std::move(*group));
  return groups;
}

}  // namespace lockstep::optim
