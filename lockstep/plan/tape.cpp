#include <lockstep/plan/tape.h>

#include <algorithm>
#include <utility>

#include <lockstep/base/error.h>

namespace lockstep::plan {

namespace {

// Bytes of the state of LibTorch's CPU generator, which a recomputed region keeps.
constexpr std::int64_t kGeneratorState = 5056;

}  // namespace

class Tape::Bytes {
 public:
  Bytes(Tape& tape, std::int64_t bytes) : tape_(tape), bytes_(bytes) { tape_.change(bytes_); }
  ~Bytes() { tape_.change(-bytes_); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

 private:
  Tape& tape_;
  std::int64_t bytes_;
};

Tape::Memory Tape::take(std::int64_t bytes) {
  return bytes == 0 ? nullptr : std::make_shared<Bytes>(*this, bytes);
}

void Tape::change(std::int64_t bytes) {
  live_ += bytes;
  peak_ = std::max(peak_, live_ - kept_);
}

void Tape::note(StepTrace::Kind kind, std::size_t parameter) {
  trace_.events.push_back({.kind = kind, .parameter = parameter, .peak_bytes = peak_});
  if (kind == StepTrace::Kind::gradient) kept_ += parameters_[parameter].bytes;
  peak_ = live_ - kept_;
}

std::size_t Tape::add_parameter(std::int64_t gradient_bytes) {
  parameters_.push_back({.bytes = gradient_bytes, .pending = 0, .gradient = nullptr});
  return parameters_.size() - 1;
}

Tape::Value Tape::input(std::int64_t bytes) { return {.memory = take(bytes), .bytes = bytes}; }

Tape::Value Tape::apply(const Operator& op) {
  for (const std::size_t parameter : op.parameters) note(StepTrace::Kind::use, parameter);
  if (second_run_ != kNone) return fill(op);
  Node node{
      .parameters = op.parameters, .read_again = op.read_again, .scratch = op.backward_scratch};
  for (std::size_t i = 0; i < op.inputs.size(); ++i)
    node.inputs.push_back(
        {.node = op.inputs[i].node,
         .output = op.inputs[i].output,
         .bytes = i < op.gradients.size() ? op.gradients[i] : op.inputs[i].bytes});
  for (const std::size_t parameter : op.parameters) ++parameters_[parameter].pending;
  return record(std::move(node), op.bytes, op);
}

Tape::Value Tape::record(Node node, std::int64_t bytes, const Operator& op) {
  node.saves = !op.saved.empty() || op.saves_result || op.statistics > 0;
  node.region = first_run_;
  node.gradients.resize(1);
  Value result{.memory = take(bytes), .bytes = bytes, .node = nodes_.size()};
  Memory statistics = take(op.statistics);
  take(op.forward_scratch);
  if (first_run_ == kNone) {
    node.saved = op.saved;
    node.saved.push_back(std::move(statistics));
    if (op.saves_result) node.saved.push_back(result.memory);
  }
  nodes_.push_back(std::move(node));
  return result;
}

// The second run ends where nothing more is saved.
Tape::Value Tape::fill(const Operator& op) {
  Value result{.bytes = op.bytes, .node = next_};
  Node& node = nodes_[next_++];
  if (next_ > wanted_end_) return result;
  const bool last = next_ == wanted_end_;
  node.saved = op.saved;
  if (last && !op.saves_result && op.statistics == 0) return result;
  result.memory = take(op.bytes);
  node.saved.push_back(take(op.statistics));
  take(op.forward_scratch);
  if (op.saves_result) node.saved.push_back(result.memory);
  return result;
}

Tape::Value Tape::add(const Value& a, const Value& b) {
  Value sum = apply({.inputs = {a, b}, .bytes = std::max(a.bytes, b.bytes)});
  if (second_run_ == kNone) nodes_[sum.node].passes_on = true;
  return sum;
}

std::vector<Tape::Value> Tape::split(const Value& whole, const std::vector<std::int64_t>& sizes) {
  Value views = apply({.inputs = {whole}});
  nodes_[views.node].gradients.resize(sizes.size());
  std::vector<Value> parts;
  for (const std::int64_t size : sizes)
    parts.push_back(
        {.memory = whole.memory, .bytes = size, .node = views.node, .output = parts.size()});
  return parts;
}

Tape::Value Tape::recompute(const Function& function, const Value& input) {
  LOCKSTEP_CHECK(first_run_ == kNone && second_run_ == kNone, "regions inside of each other");
  first_run_ = regions_.size();
  regions_.push_back({.function = function,
                      .input = input,
                      .generators = take(kGeneratorState),
                      .first = nodes_.size()});
  Value result = function(input);
  regions_[first_run_].end = nodes_.size();
  first_run_ = kNone;
  return result;
}

void Tape::run_again(Region& region) {
  region.filled = true;
  second_run_ = static_cast<std::size_t>(&region - regions_.data());
  next_ = region.first;
  wanted_end_ = region.first;
  for (std::size_t node = region.first; node < region.end; ++node)
    if (nodes_[node].saves) wanted_end_ = node + 1;
  region.function({.memory = region.input.memory, .bytes = region.input.bytes});
  second_run_ = kNone;
}

void Tape::deliver(const Edge& edge, Memory gradient) {
  if (edge.node == kNone) return;
  Memory& there = nodes_[edge.node].gradients[edge.output];
  // Added in place where nobody else has the one or the other.
  if (there == nullptr || (there.use_count() > 1 && gradient.use_count() == 1))
    there = std::move(gradient);
  else if (there.use_count() > 1)
    there = take(edge.bytes);
}

void Tape::deliver_to_parameter(std::size_t index) {
  if (--parameters_[index].pending == 0) note(StepTrace::Kind::gradient, index);
}

void Tape::run(std::size_t index) {
  Node& node = nodes_[index];
  if (std::ranges::none_of(node.gradients, [](const Memory& one) { return one != nullptr; }))
    return;
  if (node.region != kNone && node.saves && !regions_[node.region].filled)
    run_again(regions_[node.region]);
  for (const std::size_t parameter : node.read_again) note(StepTrace::Kind::use, parameter);
  std::vector<Memory> gradients;
  std::vector<Memory> of_parameters;
  {
    const Memory scratch = take(node.scratch);
    for (const Edge& edge : node.inputs)
      gradients.push_back(node.passes_on       ? node.gradients.front()
                          : edge.node == kNone ? nullptr
                                               : take(edge.bytes));
    for (const std::size_t parameter : node.parameters)
      of_parameters.push_back(take(parameters_[parameter].bytes));
  }
  node.gradients.assign(node.gradients.size(), nullptr);
  node.saved.clear();
  if (node.region != kNone && index == regions_[node.region].first) {
    regions_[node.region].input = {};
    regions_[node.region].generators = nullptr;
  }
  // The bias, which is read as it is, gets its gradient before the weight, which is read through a
  // view.
  for (std::size_t i = node.parameters.size(); i-- > 0;) {
    Memory& there = parameters_[node.parameters[i]].gradient;
    if (there == nullptr) there = std::move(of_parameters[i]);
    of_parameters[i] = nullptr;
    deliver_to_parameter(node.parameters[i]);
  }
  for (std::size_t i = 0; i < gradients.size(); ++i)
    deliver(node.inputs[i], std::move(gradients[i]));
}

StepTrace Tape::backward(Value loss) {
  trace_.saved_bytes = live_;
  nodes_[loss.node].gradients[loss.output] = take(loss.bytes);
  loss.memory = nullptr;
  for (std::size_t index = nodes_.size(); index-- > 0;) run(index);
  trace_.peak_bytes_after = peak_;
  return std::move(trace_);
}

}  // namespace lockstep::plan
