#include <lockstep/optim/lamb/plain/options.h>

#include <lockstep/base/error.h>

namespace lockstep::optim {

void LambOptions::describe(OptionKeys& keys) {
  keys.two_numbers({.name = "betas", .meaning = "how much of the two moments each step keeps"},
                   betas, {.lowest = 0, .highest = 1, .below_highest = true});
  keys.number({.name = "eps", .meaning = "added to the root of the second moment"}, eps,
              {.lowest = 0, .highest = 1, .above_lowest = true});
  keys.boolean({.name = "eps_inside_sqrt", .meaning = "whether `eps` is added under the root"},
               eps_inside_sqrt);
  keys.boolean({.name = "bias_correction",
                .meaning = "whether the learning rate makes up for moments that begin at 0"},
               bias_correction);
  keys.number({.name = "max_coeff",
               .meaning = "the most by which a step is stretched: a parameter moves in proportion "
                          "to its norm"},
              max_coeff, {.lowest = 0, .above_lowest = true});
  keys.number({.name = "min_coeff", .meaning = "the least"}, min_coeff, {.lowest = 0});
}

std::vector<OptionMistake> LambOptions::mistakes(std::string_view /*type*/) const {
  if (min_coeff <= max_coeff) return {};
  return {{.key = "min_coeff",
           .judged_with = {"max_coeff"},
           .what = fmt::format("is {}, above max_coeff, which is {}", min_coeff, max_coeff)}};
}

}  // namespace lockstep::optim
