#include <lockstep/parallel/shard/optimizer_state.h>

#include <map>
#include <optional>
#include <set>
#include <string>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/data_parallel/agreement.h>

namespace lockstep::shard {

namespace {

struct Place {
  const FlatUnit* unit = nullptr;
  std::size_t member = 0;
};

// Finds the parameter that a state's name ("exp_avg.blocks.0.weight") belongs to, where the state
// is cut as the parameter is; counts of steps are not.
class Places {
 public:
  explicit Places(std::span<const std::unique_ptr<FlatUnit>> units) {
    for (const auto& unit : units)
      for (std::size_t member = 0; member < unit->parameters().size(); ++member)
        places_[unit->parameters()[member].name] = {unit.get(), member};
  }

  std::optional<Place> find(const NamedTensor& state) const {
    if (state.tensor.dim() == 0) return {};
    const auto found = places_.find(state.name.substr(state.name.find('.') + 1));
    if (found == places_.end())
      throw UsageError(
          "the state '{}' is of no parameter of this model: pass an optimizer that its "
          "own make_optimizer() returned",
          state.name);
    return found->second;
  }

 private:
  std::map<std::string, Place> places_;
};

at::IntArrayRef shape_at(const std::optional<Place>& place) {
  return place ? place->unit->parameters()[place->member].tensor.sizes() : at::IntArrayRef();
}

// The fault of the whole state of which these are parts; empty where it fits.
std::string find_fault(const std::vector<NamedTensor>& parts, const Places& places,
                       const std::map<std::string, at::Tensor>& given, std::size_t num_given) {
  std::set<std::string> known;
  for (const NamedTensor& part : parts) {
    known.insert(part.name);
    const auto found = given.find(part.name);
    if (found == given.end()) return fmt::format("the optimizer's state has no '{}'", part.name);
    if (!found->second.defined() || found->second.sizes() != shape_at(places.find(part)))
      return fmt::format("the optimizer's state has a '{}' of another shape than its parameter",
                         part.name);
  }
  for (const auto& [name, tensor] : given)
    if (!known.contains(name))
      return fmt::format("the optimizer's state has a '{}', of which this optimizer has none",
                         name);
  if (num_given != given.size())
    return fmt::format("the optimizer's state has {} tensors of {} names", num_given, given.size());
  return "";
}

}  // namespace

at::Tensor gather_pieces(const at::Tensor& mine, const FlatUnit& unit, std::size_t member,
                         comm::Communicator& group) {
  const c10::NoGradGuard no_grad;
  // Where the group's backend takes it: what was offloaded goes there for the while.
  const at::Tensor here = mine.to(unit.device());
  const at::Tensor whole = at::empty(unit.parameters()[member].tensor.sizes(), here.options());
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group.size(); ++rank) {
    const mesh::Interval piece = unit.layout().piece(member, rank);
    parts.push_back(whole.view({-1}).narrow(0, piece.begin, piece.size()));
  }
  group.all_gather(parts, here).wait();
  return whole;
}

std::vector<NamedTensor> gather_state(const std::vector<NamedTensor>& parts,
                                      std::span<const std::unique_ptr<FlatUnit>> units,
                                      comm::Communicator& group, const StateDictOptions& options,
                                      bool is_first) {
  const Places places(units);
  const bool wanted = !options.rank0_only || is_first;
  std::vector<NamedTensor> all;
  for (const NamedTensor& part : parts) {
    const auto place = places.find(part);
    at::Tensor whole =
        place ? gather_pieces(part.tensor, *place->unit, place->member, group) : part.tensor;
    if (!wanted) continue;
    if (options.offload_to_cpu) whole = whole.cpu();
    all.push_back({part.name, std::move(whole)});
  }
  return all;
}

std::vector<mesh::HeldTensor> held_state(const std::vector<NamedTensor>& parts,
                                         std::span<const std::unique_ptr<FlatUnit>> units) {
  const Places places(units);
  std::vector<mesh::HeldTensor> held;
  for (const auto& [name, tensor] : parts) {
    const auto place = places.find({name, tensor});
    held.push_back(place ? mesh::HeldTensor{name, tensor, shape_at(place).vec(),
                                            place->unit->placement(place->member)}
                         : mesh::whole_tensor(name, tensor));
  }
  return held;
}

void scatter_state(optim::Optimizer& optimizer, const std::vector<NamedTensor>& whole,
                   std::span<const std::unique_ptr<FlatUnit>> units, comm::Communicator& all,
                   int rank) {
  const c10::NoGradGuard no_grad;
  const Places places(units);
  const std::vector<NamedTensor> parts = optimizer.state();
  std::map<std::string, at::Tensor> given;
  std::string fault;
  if (all.rank() == 0) {
    for (const auto& [name, tensor] : whole) given[name] = tensor;
    fault = find_fault(parts, places, given, whole.size());
  }
  const c10::Device device = units.front()->device();
  data_parallel::refuse_together(fault, all);

  std::vector<NamedTensor> mine;
  for (const NamedTensor& part : parts) {
    const auto place = places.find(part);
    const at::Tensor buffer =
        at::empty(shape_at(place), at::dtype(part.tensor.scalar_type()).device(device));
    if (all.rank() == 0) buffer.copy_(given.at(part.name));
    all.broadcast(buffer, 0).wait();
    at::Tensor received = buffer;
    if (place) {
      const mesh::Interval piece = place->unit->layout().piece(place->member, rank);
      received = buffer.view({-1}).narrow(0, piece.begin, piece.size()).clone();
    }
    mine.push_back({part.name, std::move(received)});
  }
  optimizer.load_state(mine);
}

}  // namespace lockstep::shard
