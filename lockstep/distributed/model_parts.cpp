#include <lockstep/distributed/model_parts.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/mesh/tensor_part.h>

namespace lockstep {

namespace {

using mesh::Placement;

// Every rank's text, on every rank.
std::vector<std::string> gather_texts(const std::string& mine, comm::Communicator& group,
                                      c10::Device wire) {
  const auto lengths = at::empty({group.size()}, at::dtype(at::kLong).device(wire));
  group
      .all_gather(lengths, at::full({1}, static_cast<std::int64_t>(mine.size()), lengths.options()))
      .wait();
  const at::Tensor sizes = lengths.cpu();
  std::vector<at::Tensor> bytes;
  for (int rank = 0; rank < group.size(); ++rank)
    bytes.push_back(
        at::empty({sizes[rank].item<std::int64_t>()}, at::dtype(at::kByte).device(wire)));
  const at::Tensor own = at::empty({static_cast<std::int64_t>(mine.size())}, at::kByte);
  std::memcpy(own.data_ptr(), mine.data(), mine.size());
  group.all_gather(bytes, own.to(wire)).wait();
  std::vector<std::string> texts;
  for (const at::Tensor& one : bytes) {
    const at::Tensor host = one.cpu();
    texts.emplace_back(static_cast<const char*>(host.data_ptr()),
                       static_cast<std::size_t>(host.numel()));
  }
  return texts;
}

// "exp_avg.<parameter>" or the parameter itself.
std::string parameter_in(const std::string& name) {
  const auto dot = name.find('.');
  return dot == std::string::npos ? name : name.substr(dot + 1);
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
                       c10::Device device)
    : group_(std::move(group)),
      wire_(group_ != nullptr && group_->backend() == "nccl" ? device : c10::Device(at::kCPU)) {
  if (alone()) return;
  for (nn::CutParameter& one : nn::cut_parameters(module)) cut_.emplace(one.name, std::move(one));
  std::vector<NamedTensor> parameters;
  for (const auto& item : module.named_parameters())
    parameters.push_back({item.key(), item.value()});
  const auto all = pieces_of_all(parameters);
  const auto rank = static_cast<std::size_t>(group_->rank());
  for (const Piece& mine : all[rank]) {
    const bool before =
        std::any_of(all.begin(), all.begin() + group_->rank(),
                    [&](const auto& its) { return std::ranges::find(its, mine) != its.end(); });
    if (!before) counted_.insert(mine.name);
  }
}

std::string ModelParts::to_text(const Piece& piece) {
  std::vector<std::int64_t> ends;
  for (const mesh::Interval& range : piece.placement.box())
    ends.insert(ends.end(), {range.begin, range.end});
  return fmt::format("{} {} {} {} {} {} {} {}\n", piece.name, static_cast<int>(piece.type),
                     piece.whole_shape.size(), fmt::join(piece.whole_shape, " "),
                     piece.placement.shape().size(), fmt::join(piece.placement.shape(), " "),
                     ends.size(), fmt::join(ends, " "));
}

ModelParts::Piece ModelParts::parse(const std::string& line) {
  std::istringstream text(line);
  std::string name;
  int type = 0;
  text >> name >> type;
  auto whole_shape = read_numbers(text);
  auto placement = Placement::full(read_numbers(text));
  const auto ends = read_numbers(text);
  LOCKSTEP_CHECK(!text.fail(), "a tensor of another rank: '{}'", line);
  for (std::size_t dim = 0; 2 * dim < ends.size(); ++dim)
    placement =
        placement.cut_dim(static_cast<int>(dim), mesh::Interval{ends[2 * dim], ends[2 * dim + 1]});
  return {.name = std::move(name),
          .type = static_cast<at::ScalarType>(type),
          .whole_shape = std::move(whole_shape),
          .placement = std::move(placement)};
}

ModelParts::Piece ModelParts::piece_of(const NamedTensor& one) const {
  for (const std::string& parameter : {one.name, parameter_in(one.name)}) {
    const auto cut = cut_.find(parameter);
    if (cut != cut_.end() && cut->second.placement.elements() == one.tensor.numel())
      return {one.name, one.tensor.scalar_type(), cut->second.whole_shape, cut->second.placement};
  }
  return {one.name, one.tensor.scalar_type(), one.tensor.sizes().vec(),
          Placement::full(one.tensor.sizes().vec())};
}

std::vector<std::vector<ModelParts::Piece>> ModelParts::pieces_of_all(
    const std::vector<NamedTensor>& mine) const {
  std::string text;
  for (const NamedTensor& one : mine) text += to_text(piece_of(one));
  std::vector<std::vector<Piece>> all;
  for (const std::string& its : gather_texts(text, *group_, wire_)) {
    auto& pieces = all.emplace_back();
    std::istringstream lines(its);
    for (std::string line; std::getline(lines, line);) pieces.push_back(parse(line));
  }
  return all;
}

optim::NormScope ModelParts::norm_scope() const {
  if (alone()) return {};
  return {
      .counts = [counted = counted_](const std::string& name) { return counted.contains(name); },
      .sum =
          [group = group_, wire = wire_](double value) {
            const at::Tensor sum = at::full({1}, value, at::dtype(at::kDouble).device(wire));
            group->all_reduce(sum).wait();
            return sum.item<double>();
          }};
}

void ModelParts::take_largest(at::Tensor& number) const {
  if (alone()) return;
  const at::Tensor sent = number.to(wire_).clone();
  group_->all_reduce(sent, comm::ReduceOp::max).wait();
  number.copy_(sent);
}

std::vector<NamedTensor> ModelParts::join(const std::vector<NamedTensor>& mine) const {
  if (alone()) return mine;
  const c10::NoGradGuard no_grad;
  const auto all = pieces_of_all(mine);
  if (group_->rank() != 0) {
    for (const NamedTensor& one : mine)
      group_->exchange({comm::send_to(0, one.tensor.detach().to(wire_).contiguous())}).wait();
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
        part = at::empty({piece.placement.elements()}, at::dtype(piece.type).device(wire_));
        group_->exchange({comm::receive_from(rank, part)}).wait();
      }
      const auto [found, added] = index.emplace(piece.name, whole.size());
      if (added)
        // What is whole here already stays the tensor that it is.
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
                                          const std::vector<NamedTensor>& whole,
                                          std::vector<std::string>& faults) const {
  if (alone()) return whole;
  const c10::NoGradGuard no_grad;
  const auto all = pieces_of_all(wanted);
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
      return at::zeros(piece.placement.box_shape(), at::dtype(piece.type).device(wire_));
    }
    return mesh::part_of(found->second.detach().to(piece.type), piece.placement).to(wire_);
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
        part = at::empty(piece.placement.box_shape(), at::dtype(piece.type).device(wire_));
        group_->exchange({comm::receive_from(0, part)}).wait();
      }
      if (mine) parts.push_back({piece.name, part.reshape(wanted[i].tensor.sizes())});
    }
  }
  return parts;
}

}  // namespace lockstep
