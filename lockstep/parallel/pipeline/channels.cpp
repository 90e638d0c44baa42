#include <lockstep/parallel/pipeline/channels.h>

#include <set>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/fmt.h>

#include <lockstep/base/error.h>

namespace lockstep::pipeline {

namespace {

// One that transports know, whatever the type.
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

// In this pass.
Channels::Boundary Channels::boundary_after(int stage, int micro_batch) const {
  return {stage, c10::GradMode::is_enabled(),
          kinds_.empty() ? 0 : kinds_.at(static_cast<std::size_t>(micro_batch))};
}

// The one that a receive's tensors come over.
Channels::Boundary Channels::boundary_of(const Action& receive) const {
  const bool activations = receive.kind == ActionKind::receive_activation;
  return boundary_after(activations ? receive.stage - 1 : receive.stage, receive.micro_batch);
}

Channels::Channel& Channels::channel(int from_stage, int to_stage) {
  return channels_.at({rank_of(from_stage), rank_of(to_stage)});
}

void Channels::send(Channel& channel, const std::vector<at::Tensor>& tensors) {
  // Those that are over keep their tensors' memory.
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

// Of activations. Starts to receive what is missing of it.
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

// All but those behind one whose shape has yet to come, or is only known when the activations that
// it is the gradient of have been computed.
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
    // The number of a shape's numbers, then these.
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

}  // namespace lockstep::pipeline
