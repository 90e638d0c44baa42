#include <lockstep/parallel/shard/sharded_optimizer.h>

#include <unordered_map>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/saved_state.h>
#include <lockstep/parallel/shard/gradient_norm.h>

namespace lockstep::shard {

namespace {

// A parameter's part that is stepped on.
struct Part {
  std::size_t unit = 0;
  std::size_t member = 0;
  at::Tensor piece;
};

// What steps on a unit's parts, by itself: the next unit's update runs while this one's result is
// on its way to a device.
struct UnitOptimizer {
  std::size_t unit = 0;
  std::vector<Part> parts;
  std::unique_ptr<optim::Optimizer> inner;
};

// What other ranks have of a unit's parameters.
class UnitParts final : public optim::Parts {
 public:
  using Members = std::unordered_map<std::string, std::size_t>;  // by the optimizer's names

  UnitParts(const FlatUnit& unit, Members members, std::shared_ptr<comm::Communicator> group)
      : unit_(unit), members_(std::move(members)), group_(std::move(group)) {}

  std::vector<double> sums_of_squares(const std::vector<NamedTensor>& parts) override {
    std::vector<GradientPiece> pieces;
    for (const auto& [name, part] : parts) {
      GradientPiece& piece = pieces.emplace_back(GradientPiece{.values = part, .ranges = {}});
      for (int rank = 0; rank < group_->size(); ++rank)
        piece.ranges.push_back(unit_.layout().piece(members_.at(name), rank));
    }
    return shard::sums_of_squares(pieces, *group_, unit_.device());
  }

 private:
  const FlatUnit& unit_;  // which the model owns
  Members members_;
  std::shared_ptr<comm::Communicator> group_;
};

class ShardedOptimizer final : public optim::Optimizer {
 public:
  ShardedOptimizer(SteppedModel model, std::vector<UnitOptimizer> units)
      : model_(std::move(model)), units_(std::move(units)) {}

  void step(double learning_rate, const optim::StepFactor& factor) override {
    // All of them before any is stepped on: one that is missing is told with the model as it was.
    for (const UnitOptimizer& unit : units_)
      for (const Part& part : unit.parts)
        part.piece.mutable_grad() = model_.gradient(part.unit, part.member);
    for (const UnitOptimizer& unit : units_) {
      unit.inner->step(learning_rate, factor);
      for (const Part& part : unit.parts) part.piece.mutable_grad() = at::Tensor();
      model_.units[unit.unit]->part_changed();
    }
    model_.after_step();
  }

  // Those of its own parameters: others may be another optimizer's.
  void zero_grad() override {
    std::vector<SteppedModel::Member> mine;
    for (const UnitOptimizer& unit : units_)
      for (const Part& part : unit.parts) mine.push_back({part.unit, part.member});
    model_.drop_gradients(mine);
  }

  std::vector<NamedTensor> state() const override {
    std::vector<NamedTensor> all;
    for (const UnitOptimizer& unit : units_)
      for (NamedTensor& one : unit.inner->state()) all.push_back(std::move(one));
    return all;
  }

  void load_state(const std::vector<NamedTensor>& state) override {
    // All of it is looked at before anything is changed.
    std::vector<at::Tensor> matched = optim::match_saved_state(this->state(), state);
    const std::vector<NamedTensor> known = this->state();
    for (std::size_t i = 0; i < known.size(); ++i)
      if (known[i].tensor.dim() == 0 && matched[i].item<std::int64_t>() < 0)
        throw UsageError("the saved state has {} as {}: a count from 0 is needed",
                         matched[i].item<std::int64_t>(), known[i].name);
    auto next = matched.begin();
    for (const UnitOptimizer& unit : units_) {
      std::vector<NamedTensor> mine = unit.inner->state();
      for (NamedTensor& one : mine) one.tensor = std::move(*next++);
      unit.inner->load_state(mine);
    }
  }

 private:
  SteppedModel model_;
  std::vector<UnitOptimizer> units_;
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
  std::vector<optim::NamedParameter> all;
  for (const optim::ParameterGroup& group : groups)
    all.insert(all.end(), group.parameters.begin(), group.parameters.end());
  optim::check_distinct(all);
  std::vector<UnitOptimizer> units(model.units.size());
  std::vector<UnitParts::Members> members_of(model.units.size());
  std::vector<std::vector<optim::ParameterGroup>> groups_of(model.units.size());
  for (const optim::ParameterGroup& group : groups) {
    for (auto& of_unit : groups_of) {
      of_unit.push_back(group);
      of_unit.back().parameters.clear();
    }
    for (const optim::NamedParameter& parameter : group.parameters) {
      const auto found = parts_of.find(parameter.tensor.unsafeGetTensorImpl());
      if (found == parts_of.end())
        throw UsageError("'{}' is no parameter of '{}': make an optimizer over the parameters of "
                         "the model that wrap_model() returned",
                         parameter.name, model.name);
      const Part& part = found->second;
      units[part.unit].parts.push_back(part);
      members_of[part.unit][parameter.name] = part.member;
      groups_of[part.unit].back().parameters.push_back({parameter.name, part.piece});
    }
  }
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    units[unit].unit = unit;
    std::erase_if(groups_of[unit], [](const auto& group) { return group.parameters.empty(); });
    units[unit].inner = optim::make_optimizer(
        options, std::move(groups_of[unit]),
        std::make_shared<UnitParts>(*model.units[unit], std::move(members_of[unit]), model.group));
  }
  std::erase_if(units, [](const UnitOptimizer& unit) { return unit.parts.empty(); });
  return std::make_unique<ShardedOptimizer>(std::move(model), std::move(units));
}

void refresh(std::span<const std::unique_ptr<FlatUnit>> units) {
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    if (!units[unit]->is_trained()) continue;
    if (units[unit]->residence() == Residence::gathered)
      units[unit]->start_gather({.subject = static_cast<std::int32_t>(unit)});
    for (const NamedTensor& parameter : units[unit]->parameters())
      parameter.tensor.unsafeGetTensorImpl()->bump_version();
  }
  for (const auto& unit : units)
    if (unit->is_trained() && unit->residence() == Residence::gathered) unit->finish_gather();
}

}  // namespace lockstep::shard
