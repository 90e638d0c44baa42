#include <lockstep/parallel/shard/sharded_optimizer.h>

#include <unordered_map>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>

namespace lockstep::shard {

namespace {

// A parameter's part that is stepped on.
struct Part {
  std::size_t unit = 0;
  std::size_t member = 0;
  at::Tensor piece;
};

class ShardedOptimizer final : public optim::Optimizer {
 public:
  ShardedOptimizer(SteppedModel model, std::vector<Part> parts,
                   std::unique_ptr<optim::Optimizer> inner)
      : model_(std::move(model)), parts_(std::move(parts)), inner_(std::move(inner)) {}

  void step(double learning_rate) override {
    model_.check();
    for (const Part& part : parts_)
      part.piece.mutable_grad() = model_.gradient(part.unit, part.member);
    inner_->step(learning_rate);
    for (const Part& part : parts_) part.piece.mutable_grad() = at::Tensor();
    model_.after_step();
  }

  void zero_grad() override { model_.drop_gradients(); }
  std::vector<NamedTensor> state() const override { return inner_->state(); }
  void load_state(const std::vector<NamedTensor>& state) override { inner_->load_state(state); }

 private:
  SteppedModel model_;
  std::vector<Part> parts_;
  std::unique_ptr<optim::Optimizer> inner_;
};

}  // namespace

std::unique_ptr<optim::Optimizer> make_sharded_optimizer(
    SteppedModel model, const optim::OptimizerOptions& options,
    std::vector<optim::ParameterGroup> groups) {
  std::unordered_map<const void*, Part> parts_of;
  for (std::size_t unit = 0; unit < model.units.size(); ++unit) {
    const auto& parameters = model.units[unit]->parameters();
    for (std::size_t member = 0; member < parameters.size(); ++member)
      parts_of[parameters[member].tensor.unsafeGetTensorImpl()] = {
          unit, member, model.units[unit]->piece(member)};
  }
  std::vector<Part> parts;
  for (optim::ParameterGroup& group : groups)
    for (optim::NamedParameter& parameter : group.parameters) {
      const auto found = parts_of.find(parameter.tensor.unsafeGetTensorImpl());
      if (found == parts_of.end())
        throw UsageError("'{}' is no parameter of '{}': make an optimizer over the parameters of "
                         "the model that wrap_model() returned",
                         parameter.name, model.name);
      parts.push_back(found->second);
      parameter.tensor = found->second.piece;
    }
  return std::make_unique<ShardedOptimizer>(std::move(model), std::move(parts),
                                            optim::make_optimizer(options, std::move(groups)));
}

void refresh(std::span<const std::unique_ptr<FlatUnit>> units) {
  std::vector<comm::Work> works;
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    if (!units[unit]->is_trained()) continue;
    if (units[unit]->residence() == Residence::gathered)
      works.push_back(units[unit]->gather({.subject = static_cast<std::int32_t>(unit)}));
    for (const NamedTensor& parameter : units[unit]->parameters())
      parameter.tensor.unsafeGetTensorImpl()->bump_version();
  }
  for (comm::Work& work : works) work.wait();
}

}  // namespace lockstep::shard
