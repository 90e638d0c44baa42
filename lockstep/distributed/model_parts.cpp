#include <lockstep/distributed/model_parts.h>

#include <algorithm>
#include <sstream>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/safetensors/content_hash.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/optim/sum_of_squares.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>

namespace lockstep {

namespace {

using mesh::Placement;

std::string parameter_in(const std::string& name, ModelParts::Names names) {
  return names == ModelParts::Names::of_tensors ? name : name.substr(name.find('.') + 1);
}

std::vector<std::int64_t> read_numbers(std::istringstream& text) {
  std::size_t count = 0;
  text >> count;
  std::vector<std::int64_t> numbers(count);
  for (std::int64_t& number : numbers) text >> number;
  return numbers;
}

}  // namespace

ModelParts::ModelParts(const torch::nn::Module& module, std::shared_ptr<comm::Communicator> group,
                       Values values)
    : group_(std::move(group)) {
  if (alone()) return;
  for (nn::CutParameter& one : nn::cut_parameters(module)) cut_.emplace(one.name, std::move(one));
  std::vector<NamedTensor> parameters;
  for (const auto& item : data_parallel::held_parameters(module))
    parameters.push_back({item.key(), item.value()});
  const auto all = pieces_of_all(parameters, Names::of_tensors);
  const auto rank = static_cast<std::size_t>(group_->rank());
  for (const Piece& mine : all[rank]) {
    const bool before =
        std::any_of(all.begin(), all.begin() + group_->rank(),
                    [&](const auto& its) { return std::ranges::find(its, mine) != its.end(); });
    if (!before) counted_.insert(mine.name);
  }
  if (values == Values::there) check_same_values(parameters, all);
}

void ModelParts::check_same_values(const std::vector<NamedTensor>& parameters,
                                   const std::vector<std::vector<Piece>>& of_all) const {
  const auto own_rank = static_cast<std::size_t>(group_->rank());
  const auto others_have = [&](const Piece& mine) {
    for (std::size_t rank = 0; rank < of_all.size(); ++rank)
      if (rank != own_rank && std::ranges::find(of_all[rank], mine) != of_all[rank].end())
        return true;
    return false;
  };
  std::string text;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Piece& mine = of_all[own_rank][i];
    if (!others_have(mine)) continue;
    const at::Tensor values = parameters[i].tensor.detach().cpu().contiguous();
    const auto hash = checkpoint::content_hash(
        std::span(static_cast<const std::byte*>(values.data_ptr()), values.nbytes()));
    text += fmt::format("{} {}", hash.text(), to_text(mine));
  }
  // By piece: the first rank that has it, and what it has.
  std::map<std::string, std::pair<int, std::string>> first;
  int rank = 0;
  for (const std::string& its : RankMessages(group_).gather(text)) {
    std::istringstream lines(its);
    for (std::string line; std::getline(lines, line);) {
      const auto space = line.find(' ');
      const std::string hash = line.substr(0, space), key = line.substr(space + 1);
      const auto& [holder, known] = first.try_emplace(key, rank, hash).first->second;
      if (known != hash)
        throw UsageError(
            "ranks {} and {} of those that share the model both have a parameter '{}', with "
            "different values, where one name is one parameter: stages of a pipeline need names "
            "of their own (as the numbers of their layers), and copies the same seed",
            holder, rank, key.substr(key.rfind('\t') + 1));
    }
    ++rank;
  }
}

// The name last: it may have blanks.
std::string ModelParts::to_text(const Piece& piece) {
  std::vector<std::int64_t> ends;
  for (const mesh::Interval& range : piece.placement.box())
    ends.insert(ends.end(), {range.begin, range.end});
  return fmt::format("{} {} {} {} {} {} {} {}\n", static_cast<int>(piece.type),
                     piece.whole_shape.size(), fmt::join(piece.whole_shape, " "),
                     piece.placement.shape().size(), fmt::join(piece.placement.shape(), " "),
                     ends.size(), fmt::join(ends, " "), '\t' + piece.name);
}

ModelParts::Piece ModelParts::parse(const std::string& line) {
  const auto tab = line.find('\t');
  LOCKSTEP_CHECK(tab != std::string::npos, "a tensor of another rank: '{}'", line);
  std::istringstream text(line.substr(0, tab));
  int type = 0;
  text >> type;
  auto whole_shape = read_numbers(text);
  auto placement = Placement::full(read_numbers(text));
  const auto ends = read_numbers(text);
  LOCKSTEP_CHECK(!text.fail(), "a tensor of another rank: '{}'", line);
  for (std::size_t dim = 0; 2 * dim < ends.size(); ++dim)
    placement =
        placement.cut_dim(static_cast<int>(dim), mesh::Interval{ends[2 * dim], ends[2 * dim + 1]});
  return {.name = line.substr(tab + 1),
          .type = static_cast<at::ScalarType>(type),
          .whole_shape = std::move(whole_shape),
          .placement = std::move(placement)};
}

const nn::CutParameter* ModelParts::cut_of(const std::string& name, Names names,
                                           at::IntArrayRef shape) const {
  const auto cut = cut_.find(parameter_in(name, names));
  // A count of steps is the whole parameter's.
  if (cut == cut_.end() || (names == Names::of_state && shape.empty())) return nullptr;
  return &cut->second;
}

std::vector<mesh::HeldTensor> ModelParts::placed(std::vector<mesh::HeldTensor> mine,
                                                 Names names) const {
  for (mesh::HeldTensor& one : mine) {
    const nn::CutParameter* const cut = cut_of(one.name, names, one.shape);
    if (cut == nullptr) continue;
    LOCKSTEP_CHECK(one.placement.has_whole_box_of_tensor() &&
                       one.placement.logical_elements() == cut->placement.elements(),
                   "{} is {}, and was cut as {}", one.name, one.placement.text(),
                   cut->placement.text());
    one.shape = cut->whole_shape;
    one.placement = cut->placement.cut_flat(one.placement.range());
  }
  return mine;
}

ModelParts::Piece ModelParts::piece_of(const NamedTensor& one, Names names) const {
  if (const nn::CutParameter* const cut = cut_of(one.name, names, one.tensor.sizes()))
    return {one.name, one.tensor.scalar_type(), cut->whole_shape, cut->placement};
  return {one.name, one.tensor.scalar_type(), one.tensor.sizes().vec(),
          Placement::full(one.tensor.sizes().vec())};
}

std::vector<std::vector<ModelParts::Piece>> ModelParts::pieces_of_all(
    const std::vector<NamedTensor>& mine, Names names) const {
  std::string text;
  for (const NamedTensor& one : mine) text += to_text(piece_of(one, names));
  std::vector<std::vector<Piece>> all;
  for (const std::string& its : RankMessages(group_).gather(text)) {
    auto& pieces = all.emplace_back();
    std::istringstream lines(its);
    for (std::string line; std::getline(lines, line);) pieces.push_back(parse(line));
  }
  return all;
}

optim::NormScope ModelParts::norm_scope() const {
  if (alone()) return {};
  const auto is_cut = [](const auto& named) {
    const nn::CutParameter& one = named.second;
    return one.parameter.sizes() != at::IntArrayRef(one.whole_shape);
  };
  return {
      .counts = [counted = counted_](const std::string& name) { return counted.contains(name); },
      .sum =
          [group = group_](const at::Tensor& mine) {
            if (mine.is_cpu()) {
              const at::Tensor sum = mine.clone();
              group->all_reduce(sum).wait();
              return sum;
            }
            // Other groups have the same numbers, and must have the same sum: NCCL adds in an order
            // that depends on the way between its ranks.
            const at::Tensor all = at::empty({group->size()}, mine.options());
            group->all_gather(all.split(1), mine.reshape({1})).wait();
            return optim::add_in_order(all, {{{0, group->size()}}});
          },
      .cuts_parameters = std::ranges::any_of(cut_, is_cut)};
}

void ModelParts::take_largest(at::Tensor& number) const {
  if (alone()) return;
  const at::Tensor sent =
      number.to(at::kCPU, number.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  group_->all_reduce(sent, comm::ReduceOp::max).wait();
  number.copy_(sent);
}

std::vector<NamedTensor> ModelParts::join(const std::vector<NamedTensor>& mine, Names names) const {
  if (alone()) return mine;
  const c10::NoGradGuard no_grad;
  const auto all = pieces_of_all(mine, names);
  if (group_->rank() != 0) {
    for (const NamedTensor& one : mine)
      group_->exchange({comm::send_to(0, one.tensor.detach().cpu().contiguous())}).wait();
    return {};
  }
  std::vector<NamedTensor> whole;
  std::map<std::string, std::size_t> index;
  for (int rank = 0; rank < group_->size(); ++rank) {
    const auto& pieces = all[static_cast<std::size_t>(rank)];
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const Piece& piece = pieces[i];
      at::Tensor part;
      if (rank == 0) {
        part = mine[i].tensor.detach();
      } else {
        part = at::empty({piece.placement.elements()}, piece.type);
        group_->exchange({comm::receive_from(rank, part)}).wait();
      }
      const auto [found, added] = index.emplace(piece.name, whole.size());
      if (added)
        // A tensor that is whole here already stays the tensor that it is.
        whole.push_back({piece.name, rank == 0 && piece.placement.whole_tensor()
                                         ? mine[i].tensor
                                         : at::empty(piece.whole_shape, part.options())});
      const at::Tensor& to = whole[found->second].tensor;
      if (!(rank == 0 && to.is_same(mine[i].tensor)) &&
          !(to.numel() == piece.placement.elements() && !added))
        mesh::write_part(to, piece.placement, part.to(to.device()));
    }
  }
  return whole;
}

std::vector<NamedTensor> ModelParts::take(const std::vector<NamedTensor>& wanted,
                                          const std::vector<NamedTensor>& whole, Names names,
                                          std::vector<std::string>& faults) const {
  if (alone()) return whole;
  const c10::NoGradGuard no_grad;
  const auto all = pieces_of_all(wanted, names);
  std::map<std::string, at::Tensor> there;
  if (group_->rank() == 0)
    for (const NamedTensor& one : whole) there.emplace(one.name, one.tensor);
  // The first rank's part, or what was there where it has none: sizes are as agreed in any case.
  const auto part_for = [&](const Piece& piece) {
    const auto found = there.find(piece.name);
    if (found == there.end() || found->second.sizes() != at::IntArrayRef(piece.whole_shape)) {
      faults.push_back(found == there.end() ? fmt::format("'{}' is missing", piece.name)
                                            : fmt::format("'{}' is {} and not [{}]", piece.name,
                                                          c10::str(found->second.sizes()),
                                                          fmt::join(piece.whole_shape, ", ")));
      return at::zeros(piece.placement.box_shape(), piece.type);
    }
    return mesh::part_of(found->second.detach().to(piece.type), piece.placement).cpu();
  };
  std::vector<NamedTensor> parts;
  for (int rank = 0; rank < group_->size(); ++rank) {
    for (std::size_t i = 0; i < all[static_cast<std::size_t>(rank)].size(); ++i) {
      const Piece& piece = all[static_cast<std::size_t>(rank)][i];
      const bool mine = rank == group_->rank();
      if (group_->rank() != 0 && !mine) break;
      at::Tensor part;
      if (group_->rank() == 0) part = part_for(piece);
      if (rank != 0 && !mine) group_->exchange({comm::send_to(rank, part.contiguous())}).wait();
      if (rank != 0 && mine) {
        part = at::empty(piece.placement.box_shape(), piece.type);
        group_->exchange({comm::receive_from(0, part)}).wait();
      }
      if (mine) parts.push_back({piece.name, part.reshape(wanted[i].tensor.sizes())});
    }
  }
  return parts;
}

}  // namespace lockstep
