#include <lockstep/optim/optimizer.h>

#include <lockstep/optim/adamw.h>
#include <lockstep/optim/sgd.h>

namespace lockstep::optim {

namespace {

struct Maker {
  std::vector<ParameterGroup> groups;

  std::unique_ptr<Optimizer> operator()(const AdamWOptions& options) {
    return std::make_unique<AdamW>(std::move(groups), options);
  }
  std::unique_ptr<Optimizer> operator()(const SGDOptions& options) {
    return std::make_unique<SGD>(std::move(groups), options);
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options,
                                          std::vector<ParameterGroup> groups) {
  return std::visit(Maker{std::move(groups)}, options);
}

}  // namespace lockstep::optim
