#include <lockstep/parallel/shard/sharded_optimizer.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <unordered_map>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/joined_optimizer.h>
#include <lockstep/parallel/shard/gradient_norm.h>

namespace lockstep::shard {

namespace {

// A parameter's part that is stepped on.
struct Part {
  std::size_t unit = 0;
  std::size_t member = 0;
  at::Tensor piece;
};

// An optimizer that steps on the parts of some units. There is one for each unit, so that the next
// unit's update runs while this one's result is on its way to a device; an optimizer of whole
// matrices has them all, so that ranks can share them out.
struct UnitOptimizer {
  std::vector<std::size_t> units;
  std::vector<Part> parts;
  std::unique_ptr<optim::Optimizer> inner;
};

// Parameters of which other ranks have further parts.
class CutParts final : public optim::Parts {
 public:
  struct Place {
    const FlatUnit* unit = nullptr;  // which the model owns
    std::size_t member = 0;
  };
  using Places = std::unordered_map<std::string, Place>;  // by the optimizer's names
  using Matrix = optim::WholeMatrices::Matrix;

  CutParts(Places places, std::shared_ptr<comm::Communicator> group)
      : places_(std::move(places)), group_(std::move(group)) {}

  std::vector<std::int64_t> whole_shape(const std::string& name,
                                        const at::Tensor& /*part*/) const override {
    const Place& place = places_.at(name);
    return place.unit->parameters()[place.member].tensor.sizes().vec();
  }

  std::vector<double> sums_of_squares(const std::vector<NamedTensor>& parts) override {
    if (parts.empty()) return {};
    std::vector<GradientPiece> pieces;
    for (const auto& [name, part] : parts)
      pieces.push_back({.values = part, .ranges = pieces_of(name)});
    return shard::sums_of_squares(pieces, *group_, device());
  }

  // The ranks gather the numbers of those parameters of which a cut goes through a block.
  void join_blocks(std::int64_t block_elements, std::span<optim::BlockEdges> edges) override {
    std::vector<optim::BlockEdges*> cut;
    std::int64_t numbers_of_rank = 0;
    for (optim::BlockEdges& one : edges) {
      const auto within_block = [&](const mesh::Interval& piece) {
        return piece.size() > 0 && piece.begin % block_elements != 0;
      };
      if (!std::ranges::any_of(pieces_of(one.name), within_block)) continue;
      cut.push_back(&one);
      numbers_of_rank += static_cast<std::int64_t>(one.first.size() + one.last.size());
    }
    if (cut.empty()) return;
    const at::Tensor mine = at::empty({numbers_of_rank}, at::kFloat);
    float* number = mine.data_ptr<float>();
    for (const optim::BlockEdges* one : cut) {
      number = std::ranges::copy(one->first, number).out;
      number = std::ranges::copy(one->last, number).out;
    }
    const at::Tensor all =
        at::empty({group_->size(), numbers_of_rank}, at::dtype(at::kFloat).device(device()));
    std::vector<at::Tensor> of_ranks;
    for (int rank = 0; rank < group_->size(); ++rank) of_ranks.push_back(all[rank]);
    group_->all_gather(of_ranks, mine.to(device())).wait();
    const at::Tensor there = all.cpu();
    std::int64_t place = 0;
    for (optim::BlockEdges* one : cut) {
      join_edges(*one, block_elements, there.narrow(1, place, 2 * std::ssize(one->first)));
      place += 2 * std::ssize(one->first);
    }
  }

  void compute_whole(const std::vector<Matrix>& matrices,
                     const optim::WholeMatrices& work) override {
    // The ranks of a call send each other one type.
    for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
      std::vector<std::size_t> chosen;
      for (std::size_t i = 0; i < matrices.size(); ++i)
        if (matrices[i].type == type) chosen.push_back(i);
      const std::vector<std::vector<std::size_t>> of_ranks = shared_out(matrices, chosen);
      std::size_t num_turns = 0;
      for (const auto& of_rank : of_ranks) num_turns = std::max(num_turns, of_rank.size());
      for (std::size_t turn = 0; turn < num_turns; ++turn) {
        std::vector<std::optional<std::size_t>> computed_by;  // each rank
        for (const auto& of_rank : of_ranks)
          computed_by.push_back(turn < of_rank.size() ? std::optional(of_rank[turn])
                                                      : std::nullopt);
        take_turn(matrices, work, computed_by, type);
      }
    }
  }

 private:
  // `numbers`: [ranks, first and last], of each rank.
  void join_edges(optim::BlockEdges& mine, std::int64_t block_elements,
                  const at::Tensor& numbers) const {
    const std::vector<mesh::Interval> pieces = pieces_of(mine.name);
    const mesh::Interval& here = pieces[static_cast<std::size_t>(group_->rank())];
    if (here.size() == 0) return;
    const auto join = [&](std::vector<float>& joined, std::int64_t block) {
      for (int rank = 0; rank < group_->size(); ++rank) {
        const mesh::Interval& piece = pieces[static_cast<std::size_t>(rank)];
        if (piece.size() == 0) continue;
        const float* const its = numbers[rank].data_ptr<float>();
        for (std::size_t i = 0; i < joined.size(); ++i) {
          if (piece.begin / block_elements == block)
            joined[i] = optim::BlockEdges::joined(joined[i], its[i]);
          if ((piece.end - 1) / block_elements == block)
            joined[i] = optim::BlockEdges::joined(joined[i], its[joined.size() + i]);
        }
      }
    };
    join(mine.first, here.begin / block_elements);
    join(mine.last, (here.end - 1) / block_elements);
  }

  c10::Device device() const { return places_.begin()->second.unit->device(); }

  std::vector<mesh::Interval> pieces_of(const std::string& name) const {
    const Place& place = places_.at(name);
    std::vector<mesh::Interval> pieces;
    for (int rank = 0; rank < group_->size(); ++rank)
      pieces.push_back(place.unit->layout().piece(place.member, rank));
    return pieces;
  }

  // The matrices of each rank, the most work first: each goes to the rank that has the least so
  // far, so that those of a turn are about equally much work.
  std::vector<std::vector<std::size_t>> shared_out(const std::vector<Matrix>& matrices,
                                                   std::vector<std::size_t> chosen) const {
    const auto work_of = [&](std::size_t i) {
      const auto rows = static_cast<double>(matrices[i].shape.front());
      const auto elements = static_cast<double>(c10::multiply_integers(matrices[i].shape));
      return elements * std::min(rows, elements / rows);
    };
    std::ranges::stable_sort(chosen, std::greater<>(), work_of);
    std::vector<std::vector<std::size_t>> of_ranks(static_cast<std::size_t>(group_->size()));
    std::vector<double> loads(of_ranks.size());
    for (const std::size_t i : chosen) {
      const auto rank = static_cast<std::size_t>(std::ranges::min_element(loads) - loads.begin());
      of_ranks[rank].push_back(i);
      loads[rank] += work_of(i);
    }
    return of_ranks;
  }

  // Every rank computes one matrix, or none.
  void take_turn(const std::vector<Matrix>& matrices, const optim::WholeMatrices& work,
                 const std::vector<std::optional<std::size_t>>& computed_by, at::ScalarType type) {
    const auto mine = static_cast<std::size_t>(group_->rank());
    const at::TensorOptions options = at::dtype(type).device(device());
    const auto split = [&](const at::Tensor& whole, std::size_t matrix) {
      std::vector<at::Tensor> parts;
      for (const mesh::Interval& piece : pieces_of(matrices[matrix].name))
        parts.push_back(whole.narrow(0, piece.begin, piece.size()));
      return parts;
    };
    const std::vector<at::Tensor> none(computed_by.size(), at::empty({0}, options));
    std::vector<at::Tensor> parts;
    for (const auto& matrix : computed_by)
      parts.push_back(matrix ? work.take(*matrix).to(device()) : at::empty({0}, options));
    at::Tensor whole;
    if (computed_by[mine])
      whole = at::empty({c10::multiply_integers(matrices[*computed_by[mine]].shape)}, options);
    group_->all_to_all(whole.defined() ? split(whole, *computed_by[mine]) : none, parts).wait();
    at::Tensor result;
    if (whole.defined())
      result = work.compute(*computed_by[mine], std::move(whole)).reshape({-1}).contiguous();
    group_->all_to_all(parts, result.defined() ? split(result, *computed_by[mine]) : none).wait();
    for (std::size_t rank = 0; rank < computed_by.size(); ++rank)
      if (computed_by[rank]) work.give(*computed_by[rank], parts[rank]);
  }

  Places places_;
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
      for (const std::size_t changed : unit.units) model_.units[changed]->part_changed();
    }
    model_.after_step();
  }

  // Clears the gradients of its own parameters only: others may be another optimizer's.
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

  std::int64_t state_bytes() const override {
    std::int64_t bytes = 0;
    for (const UnitOptimizer& unit : units_) bytes += unit.inner->state_bytes();
    return bytes;
  }
  void load_state(const std::vector<NamedTensor>& state) override {
    std::vector<optim::Optimizer*> each;
    for (const UnitOptimizer& unit : units_) each.push_back(unit.inner.get());
    optim::load_states(each, state);
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
  const bool together = options.kind() == optim::StepKind::whole_matrices;
  std::vector<UnitOptimizer> units(together ? 1 : model.units.size());
  std::vector<CutParts::Places> places_of(units.size());
  std::vector<std::vector<optim::ParameterGroup>> groups_of(units.size());
  const auto begins = std::make_shared<std::unordered_map<std::string, std::int64_t>>();
  for (const optim::ParameterGroup& group : groups) {
    for (auto& of_unit : groups_of) {
      of_unit.push_back(group);
      of_unit.back().parameters.clear();
      of_unit.back().elements_before = [begins](const std::string& name) {
        return begins->at(name);
      };
    }
    for (const optim::NamedParameter& parameter : group.parameters) {
      const auto found = parts_of.find(parameter.tensor.unsafeGetTensorImpl());
      if (found == parts_of.end())
        throw UsageError("'{}' is no parameter of '{}': make an optimizer over the parameters of "
                         "the model that wrap_model() returned",
                         parameter.name, model.name);
      const Part& part = found->second;
      const std::size_t unit = together ? 0 : part.unit;
      units[unit].parts.push_back(part);
      if (std::ranges::count(units[unit].units, part.unit) == 0)
        units[unit].units.push_back(part.unit);
      places_of[unit][parameter.name] = {model.units[part.unit].get(), part.member};
      (*begins)[parameter.name] =
          model.units[part.unit]->layout().piece(part.member, model.group->rank()).begin;
      groups_of[unit].back().parameters.push_back({parameter.name, part.piece});
    }
  }
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    std::erase_if(groups_of[unit], [](const auto& group) { return group.parameters.empty(); });
    units[unit].inner =
        optim::make_optimizer(options, std::move(groups_of[unit]),
                              std::make_shared<CutParts>(std::move(places_of[unit]), model.group));
  }
  std::erase_if(units, [](const UnitOptimizer& unit) { return unit.parts.empty(); });
  return std::make_unique<ShardedOptimizer>(std::move(model), std::move(units));
}

void refresh(std::span<const std::unique_ptr<FlatUnit>> units) {
  naming_units(units, [&] {
    for (std::size_t unit = 0; unit < units.size(); ++unit) {
      if (!units[unit]->is_trained()) continue;
      if (units[unit]->residence() == Residence::gathered)
        units[unit]->start_gather({.subject = static_cast<std::int32_t>(unit)});
      for (const NamedTensor& parameter : units[unit]->parameters())
        parameter.tensor.unsafeGetTensorImpl()->bump_version();
    }
    for (const auto& unit : units)
      if (unit->is_trained() && unit->residence() == Residence::gathered) unit->finish_gather();
  });
}

}  // namespace lockstep::shard
