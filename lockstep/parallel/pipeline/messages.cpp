#include <lockstep/parallel/pipeline/messages.h>

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>

namespace lockstep::pipeline {

namespace {

constexpr std::int64_t kNumbersOfScalar = 3;  // numbers of a tensor without dims
// 128 MiB of numbers, which is millions of tensors: more cannot be true.
constexpr std::int64_t kMostNumbers = 1 << 24;

[[noreturn]] void refuse(const std::string& group, const std::string& what) {
  throw CommError({.fault = Fault::corrupted,
                   .operation = "the shapes between two stages",
                   .group = group,
                   .ranks = {0},  // rank 0 of a channel sends
                   .explanation = what});
}

class Reader {
 public:
  Reader(std::span<const std::int64_t> numbers, const std::string& group)
      : rest_(numbers), group_(group) {}

  std::int64_t left() const { return static_cast<std::int64_t>(rest_.size()); }

  // A number from 0 up to `most`.
  std::int64_t next(std::int64_t most, const char* what) {
    if (rest_.empty()) refuse(group_, fmt::format("{} is missing at the end", what));
    const std::int64_t number = rest_.front();
    rest_ = rest_.subspan(1);
    if (number < 0 || number > most)
      refuse(group_, fmt::format("{} is {}, and there can be 0 to {}", what, number, most));
    return number;
  }

 private:
  std::span<const std::int64_t> rest_;
  const std::string& group_;
};

BoundaryShape::Entry read_entry(Reader& reader, const std::string& group) {
  constexpr auto kMostTypes = static_cast<std::int64_t>(at::ScalarType::NumOptions) - 1;
  BoundaryShape::Entry entry;
  entry.type = static_cast<at::ScalarType>(reader.next(kMostTypes, "a tensor's type"));
  if (entry.type == at::ScalarType::Undefined) refuse(group, "a tensor's type is none");
  entry.wants_gradient = reader.next(1, "whether a tensor wants a gradient") != 0;
  const std::int64_t num_dims = reader.next(reader.left() - 1, "a tensor's number of dims");
  auto left = std::numeric_limits<std::int64_t>::max() /
              static_cast<std::int64_t>(c10::elementSize(entry.type));
  for (std::int64_t dim = 0; dim < num_dims; ++dim) {
    const std::int64_t size = reader.next(left, "a tensor's size");
    if (size > 0) left /= size;
    entry.sizes.push_back(size);
  }
  return entry;
}

}  // namespace

std::string BoundaryShape::text() const {
  std::vector<std::string> words;
  for (const Entry& entry : entries)
    words.push_back(fmt::format("{} [{}]{}", c10::toString(entry.type),
                                fmt::join(entry.sizes, ", "),
                                entry.wants_gradient ? " with a gradient" : ""));
  return words.empty() ? "nothing" : fmt::format("{}", fmt::join(words, ", "));
}

BoundaryShape shape_of(const std::vector<at::Tensor>& tensors) {
  BoundaryShape shape;
  for (const at::Tensor& tensor : tensors)
    shape.entries.push_back({tensor.sizes().vec(), tensor.scalar_type(), tensor.requires_grad()});
  return shape;
}

std::vector<std::int64_t> to_numbers(const BoundaryShape& shape) {
  std::vector<std::int64_t> numbers = {static_cast<std::int64_t>(shape.entries.size())};
  for (const BoundaryShape::Entry& entry : shape.entries) {
    numbers.push_back(static_cast<std::int64_t>(entry.type));
    numbers.push_back(entry.wants_gradient ? 1 : 0);
    numbers.push_back(static_cast<std::int64_t>(entry.sizes.size()));
    numbers.insert(numbers.end(), entry.sizes.begin(), entry.sizes.end());
  }
  return numbers;
}

std::int64_t checked_count(std::int64_t count, const std::string& group) {
  if (count < 1 || count > kMostNumbers)
    refuse(group, fmt::format("they are said to be {} numbers, and there can be 1 to {}", count,
                              kMostNumbers));
  return count;
}

BoundaryShape shape_from(std::span<const std::int64_t> numbers, const std::string& group) {
  Reader reader(numbers, group);
  const std::int64_t most = std::max<std::int64_t>(reader.left() - 1, 0) / kNumbersOfScalar;
  const std::int64_t num_tensors = reader.next(most, "the number of tensors");
  BoundaryShape shape;
  for (std::int64_t i = 0; i < num_tensors; ++i) shape.entries.push_back(read_entry(reader, group));
  if (reader.left() > 0)
    refuse(group, fmt::format("{} numbers are left behind the last of {} tensors", reader.left(),
                              num_tensors));
  return shape;
}

namespace {

// Transports do not know all types, but they know bytes.
at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.reshape({-1}).view(at::kByte); }

}  // namespace

Channels::Channels(const Schedule& schedule, comm::Communicator& group, c10::Device device)
    : schedule_(schedule), rank_(group.rank()), device_(device) {
  std::set<Pair> pairs;
  for (int stage = 0; stage + 1 < schedule.num_stages(); ++stage)
    if (is_sent(schedule, stage, stage + 1)) {
      pairs.insert({rank_of(stage), rank_of(stage + 1)});
      pairs.insert({rank_of(stage + 1), rank_of(stage)});
    }
  for (const auto& [from, to] : pairs) {
    const bool mine = from == rank_ || to == rank_;
    auto both = group.split(mine ? 0 : -1, from == rank_ ? 0 : 1,
                            fmt::format("{}, {} to {}", group.name(), from, to));
    if (mine) channels_[{from, to}].group = std::move(both);
  }
}

int Channels::rank_of(int stage) const {
  return schedule_.rank_of_stage[static_cast<std::size_t>(stage)];
}

// The boundary behind a stage in this pass.
Channels::Boundary Channels::boundary_after(int stage, int micro_batch) const {
  return {stage, c10::GradMode::is_enabled(),
          kinds_.empty() ? 0 : kinds_.at(static_cast<std::size_t>(micro_batch))};
}

// The boundary that a receive's tensors cross.
Channels::Boundary Channels::boundary_of(const Action& receive) const {
  const bool activations = receive.kind == ActionKind::receive_activation;
  return boundary_after(activations ? receive.stage - 1 : receive.stage, receive.micro_batch);
}

Channels::Channel& Channels::channel(int from_stage, int to_stage) {
  return channels_.at({rank_of(from_stage), rank_of(to_stage)});
}

void Channels::send(Channel& channel, const std::vector<at::Tensor>& tensors) {
  // Complete sends still hold their tensors' memory.
  for (; !sends_.empty() && sends_.front().done(); sends_.pop_front()) sends_.front().wait();
  for (const at::Tensor& tensor : tensors)
    sends_.push_back(
        channel.group->exchange({comm::send_to(1, bytes_of(tensor.detach().contiguous()))}));
}

void Channels::send_shape(Channel& channel, const BoundaryShape& shape) {
  const std::vector<std::int64_t> numbers = to_numbers(shape);
  const auto count = static_cast<std::int64_t>(numbers.size());
  send(channel, {at::tensor({count}, at::kLong), at::tensor(numbers, at::kLong)});
}

void Channels::send_activations(int stage, int micro_batch,
                                const std::vector<at::Tensor>& outputs) {
  Channel& to_next = channel(stage, stage + 1);
  const BoundaryShape shape = shape_of(outputs);
  const auto [known, first] = shapes_.emplace(boundary_after(stage, micro_batch), shape);
  if (first)
    send_shape(to_next, shape);
  else if (known->second != shape)
    throw UsageError(
        "stage {} of the pipeline gives {} for a micro-batch, and gave {} for the "
        "first: micro-batches must be of one shape, so pad them, or say with expect_kinds() "
        "which are of another",
        stage, shape.text(), known->second.text());
  send(to_next, outputs);
}

void Channels::send_gradients(int stage, const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& input : inputs)
    if (input.requires_grad())
      gradients.push_back(input.grad().defined() ? input.grad() : at::zeros_like(input));
  send(channel(stage, stage - 1), gradients);
}

void Channels::start(Channel& channel, Receive& receive) {
  const bool activations = receive.action.kind == ActionKind::receive_activation;
  for (const BoundaryShape::Entry& entry : shapes_.at(boundary_of(receive.action)).entries) {
    if (!activations && !entry.wants_gradient) continue;
    receive.tensors.push_back(at::empty(entry.sizes, at::dtype(entry.type).device(device_)));
    receive.works.push_back(
        channel.group->exchange({comm::receive_from(0, bytes_of(receive.tensors.back()))}));
  }
  receive.started = true;
}

// Whether the shape of activations is known. Starts to receive the missing part of it.
bool Channels::has_shape(Channel& channel, Receive& receive) {
  const auto begin = [&](at::Tensor& numbers, std::int64_t count) {
    numbers = at::empty({count}, at::kLong);
    receive.shape_work = channel.group->exchange({comm::receive_from(0, bytes_of(numbers))});
  };
  if (!receive.num_shape_numbers.defined()) begin(receive.num_shape_numbers, 1);
  if (!receive.shape_work.done()) return false;
  receive.shape_work.wait();
  if (!receive.shape_numbers.defined()) {
    const std::string& group = channel.group->name();
    begin(receive.shape_numbers,
          checked_count(receive.num_shape_numbers.item<std::int64_t>(), group));
    if (!receive.shape_work.done()) return false;
    receive.shape_work.wait();
  }
  const at::Tensor numbers = receive.shape_numbers.cpu();
  const auto* first = numbers.data_ptr<std::int64_t>();
  shapes_.emplace(boundary_of(receive.action),
                  shape_from({first, first + numbers.numel()}, channel.group->name()));
  return true;
}

// Starts receives up to the first whose shape is not known: it has yet to arrive or, for a
// gradient, to be computed with its activations.
void Channels::start_those_possible(Channel& channel) {
  for (Receive& receive : channel.receives) {
    if (receive.started) continue;
    const auto boundary = boundary_of(receive.action);
    if (!shapes_.contains(boundary)) {
      if (receive.action.kind == ActionKind::receive_gradient) return;
      if (!has_shape(channel, receive)) return;
    }
    start(channel, receive);
  }
}

Channels::Receive Channels::take(Channel& channel, const Action& action) {
  start_those_possible(channel);
  for (auto receive = channel.receives.begin(); receive != channel.receives.end(); ++receive) {
    // First the number of a shape's numbers is awaited, then the numbers.
    while (!receive->started) {
      LOCKSTEP_CHECK(receive->num_shape_numbers.defined(),
                     "a gradient is received before its activations were sent");
      receive->shape_work.wait_on_host();
      start_those_possible(channel);
    }
    if (receive->action != action) continue;
    Receive taken = std::move(*receive);
    channel.receives.erase(receive);
    for (comm::Work& work : taken.works) work.wait();
    return taken;
  }
  LOCKSTEP_CHECK(false, "a stage's input that the schedule does not receive");
}

void Channels::start_receiving_activations(int stage, int micro_batch) {
  Channel& from_before = channel(stage - 1, stage);
  from_before.receives.push_back({{ActionKind::receive_activation, stage, micro_batch}});
  start_those_possible(from_before);
}

std::vector<at::Tensor> Channels::receive_activations(int stage, int micro_batch) {
  Receive taken =
      take(channel(stage - 1, stage), {ActionKind::receive_activation, stage, micro_batch});
  const auto& entries = shapes_.at(boundary_after(stage - 1, micro_batch)).entries;
  for (std::size_t i = 0; i < entries.size(); ++i)
    taken.tensors[i].requires_grad_(entries[i].wants_gradient);
  return std::move(taken.tensors);
}

void Channels::start_receiving_gradients(int stage, int micro_batch) {
  Channel& from_next = channel(stage + 1, stage);
  from_next.receives.push_back({{ActionKind::receive_gradient, stage, micro_batch}});
  start_those_possible(from_next);
}

std::vector<at::Tensor> Channels::receive_gradients(int stage, int micro_batch) {
  Receive taken =
      take(channel(stage + 1, stage), {ActionKind::receive_gradient, stage, micro_batch});
  std::vector<at::Tensor> gradients;
  auto next = taken.tensors.begin();
  for (const BoundaryShape::Entry& entry : shapes_.at(boundary_after(stage, micro_batch)).entries)
    gradients.push_back(entry.wants_gradient ? *next++ : at::Tensor());
  return gradients;
}

void Channels::finish_sends() {
  for (comm::Work& work : sends_) work.wait();
  sends_.clear();
}

void Channels::abort(const std::string& reason) {
  for (auto& [ends, channel] : channels_) {
    channel.group->abort(reason);
    channel.receives.clear();
  }
  sends_.clear();
}

StepLoss::StepLoss(std::shared_ptr<comm::Communicator> group, int rank, int num_micro_batches,
                   c10::Device device)
    : group_(std::move(group)),
      rank_(rank),
      num_micro_batches_(num_micro_batches),
      device_(device) {}

StepLoss::~StepLoss() {
  try {
    telling_.wait_on_host();
  } catch (const CommError&) {
    // The group has been aborted, and its user knows that already.
  }
}

void StepLoss::begin() {
  sum_ = at::Tensor();
  num_added_ = 0;
  is_told_ = false;
}

void StepLoss::add(const at::Tensor& loss) {
  const at::Tensor wide = loss.detach().reshape({}).to(at::kDouble);
  sum_ = sum_.defined() ? sum_ + wide : wide;
  // With a GPU the host would have to wait for the loss here.
  const bool at_once = device_.is_cpu();
  if (++num_added_ == num_micro_batches_ && at_once) tell();
}

void StepLoss::tell() {
  telling_.wait();
  sum_ = sum_.cpu();
  std::vector<comm::Transfer> sends;
  for (int rank = 0; rank < group_->size(); ++rank)
    if (rank != rank_) sends.push_back(comm::send_to(rank, sum_));
  if (!sends.empty()) telling_ = group_->exchange(std::move(sends));
  is_told_ = true;
}

double StepLoss::of_all_ranks() {
  if (group_->rank() == rank_) {
    if (!is_told_) tell();
    return sum_.item<double>();
  }
  const at::Tensor sum = at::empty({}, at::kDouble);
  group_->exchange({comm::receive_from(rank_, sum)}).wait();
  return sum.item<double>();
}

TiedGradients::TiedGradients(std::vector<TiedParameter> tied, const Schedule& schedule,
                             comm::Communicator& group) {
  for (TiedParameter& one : tied) {
    std::set<int> ranks;
    for (const int stage : one.stages)
      ranks.insert(schedule.rank_of_stage.at(static_cast<std::size_t>(stage)));
    if (ranks.size() < 2) continue;
    auto sharing =
        group.split(ranks.contains(group.rank()) ? 0 : -1, group.rank(),
                    fmt::format("{}, tied stages {}", group.name(), fmt::join(one.stages, ",")));
    if (sharing != nullptr) tied_.push_back({std::move(one.mine), std::move(sharing), {}});
  }
}

void TiedGradients::put_aside() {
  for (Tied& tied : tied_) tied.before = std::exchange(tied.parameter.mutable_grad(), {});
}

void TiedGradients::sum() {
  for (Tied& tied : tied_) {
    at::Tensor& gradient = tied.parameter.mutable_grad();
    if (!gradient.defined())
      gradient = at::zeros_like(tied.parameter, at::MemoryFormat::Contiguous);
    gradient = gradient.contiguous();
    tied.group->all_reduce(gradient).wait();
    // The sum is added to the old tensor, because others may refer to it.
    if (tied.before.defined()) gradient = tied.before.add_(gradient);
    tied.before = at::Tensor();
  }
}

void TiedGradients::abort(const std::string& reason) {
  for (const Tied& tied : tied_) tied.group->abort(reason);
}

}  // namespace lockstep::pipeline
