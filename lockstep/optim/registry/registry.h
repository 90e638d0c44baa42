// The optimizers that configs can name.
#pragma once

#include <string>
#include <vector>

#include <lockstep/optim/options/optimizer_options.h>

namespace lockstep::optim {

struct OptimizerType {
  // Its names in configs. The first is the one that is written; capitals do not matter.
  std::vector<std::string> names;
  OptimizerOptions options;  // which a config changes
};

// The types of optimizers.h, followed by the registered ones. Threading: any thread.
std::vector<OptimizerType> optimizer_types();

// The first of the names that a struct of options stands under; its C++ name where it has none.
std::string name_of(const OptimizerOptions& options);

// Adds one for as long as the process runs. UsageError where a name is taken. A program calls
// register_optimizer() (optim/optimizer.h), which adds what makes the optimizer, too.
void register_optimizer_type(OptimizerType type);

}  // namespace lockstep::optim
