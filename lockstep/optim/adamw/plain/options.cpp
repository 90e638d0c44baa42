#include <lockstep/optim/adamw/plain/options.h>

namespace lockstep::optim {

void AdamWOptions::describe(OptionKeys& keys) {
  keys.two_numbers({.name = "betas", .meaning = "how much of the two moments each step keeps"},
                   betas, {.lowest = 0, .highest = 1, .below_highest = true});
  keys.number({.name = "eps", .meaning = "added to the root of the second moment"}, eps,
              {.lowest = 0, .highest = 1, .above_lowest = true});
  bool decoupled = decay == AdamDecay::decoupled;
  keys.boolean(
      {.name = "adam_w_mode",
       .meaning = "Adam: decoupled decay, as AdamW has it; false: decay as part of the gradient"},
      decoupled);
  decay = decoupled ? AdamDecay::decoupled : AdamDecay::coupled;
  keys.boolean({.name = "bias_correction",
                .meaning = "whether moments, which begin at 0, are scaled up in the first steps"},
               bias_correction);
}

std::vector<OptionMistake> AdamWOptions::mistakes(std::string_view type) const {
  constexpr std::string_view kDecoupled = "AdamW";
  if (!type.starts_with(kDecoupled) || decay == AdamDecay::decoupled) return {};
  return {{.key = "adam_w_mode",
           .judged_with = {},
           .what = "is false, but optimizer.type is \"" + std::string(type) +
                   "\": use the type \"Adam" + std::string(type.substr(kDecoupled.size())) +
                   "\" for decay that is part of the gradient"}};
}

}  // namespace lockstep::optim
