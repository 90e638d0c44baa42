#include <lockstep/parallel/shard/parameter_gatherer.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <thread>

#include <lockstep/base/error.h>

namespace lockstep::shard {

namespace {

// A program that only evaluates never ends a step.
constexpr std::size_t kRemembered = 1 << 16;

}  // namespace

std::optional<std::size_t> UseOrder::note(std::size_t unit) {
  if (now_.size() < kRemembered) now_.push_back(unit);
  // Where a step departs from the last one, it is expected to go on from the same unit's next use.
  auto found = std::find(last_.begin() + static_cast<std::ptrdiff_t>(next_), last_.end(), unit);
  if (found == last_.end()) found = std::find(last_.begin(), last_.end(), unit);
  if (found == last_.end()) return {};
  next_ = static_cast<std::size_t>(found - last_.begin()) + 1;
  return next_ < last_.size() ? std::optional(last_[next_]) : std::nullopt;
}

std::optional<std::size_t> UseOrder::start_over() {
  if (!now_.empty()) last_ = std::move(now_);
  now_.clear();
  next_ = 0;
  return last_.empty() ? std::nullopt : std::optional(last_.front());
}

namespace {

constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

// Whether the first of these tensors is about to be given memory of its own.
bool gives_other_memory(const intercept::Call& call, std::span<const intercept::Use> uses) {
  const std::string& op = call.op().operator_name().name;
  if (op == "aten::set_") return uses.front().written;
  // set_data() is no operator by itself, and calls the first of these before it does anything.
  if (op != "aten::_has_compatible_shallow_copy_type" && op != "aten::set_data") return false;
  const at::Tensor& tensor = call.arguments()[0].toTensor();
  const at::Tensor& given = call.arguments()[1].toTensor();
  return tensor.is_same(uses.front().tensor) && !(given.has_storage() && given.is_alias_of(tensor));
}

// A parameter that were given memory of its own would be trained on each rank by itself.
[[noreturn]] void refuse_other_memory(const at::Tensor& tensor, const FlatUnit& unit) {
  const auto found = std::ranges::find_if(
      unit.parameters(), [&](const NamedTensor& one) { return one.tensor.is_same(tensor); });
  throw UsageError(
      "{} was to be given other memory, as to(device), to(dtype), set_data() and torch::load() do: "
      "convert the model, or load into it, before wrap_model(); afterwards there is "
      "load_full_state_dict()",
      found != unit.parameters().end()
          ? fmt::format("'{}', which is sharded,", found->name)
          : fmt::format("a view of a parameter of the sharded unit '{}'", unit.name()));
}

}  // namespace

ParameterGatherer::ParameterGatherer(std::span<const std::unique_ptr<FlatUnit>> units,
                                     Limits limits)
    : units_(units), limits_(limits), states_(units.size()), last_used_(kNone) {
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    if (!units[unit]->has_owner()) continue;
    by_memory_[units[unit]->flat().storage().unsafeGetStorageImpl()] = unit;
    if (units[unit]->residence() == Residence::sharded && units[unit]->is_there())
      live_.push_back(unit);
  }
}

void ParameterGatherer::on_call(intercept::Call& call, std::span<const intercept::Use> uses) {
  if (gives_other_memory(call, uses))
    refuse_other_memory(uses.front().tensor, *units_[unit_of(uses.front().tensor)]);
  Hold::Units units;
  for (const intercept::Use& use : uses) {
    const std::size_t unit = unit_of(use.tensor);
    if (std::ranges::find(units, unit) == units.end()) units.push_back(unit);
  }
  const Hold hold(*this, std::move(units));
  call.proceed();
  for (const intercept::Use& use : uses)
    if (use.written) units_[unit_of(use.tensor)]->keep_edits();
}

void ParameterGatherer::on_save(const at::Tensor& tensor) const {
  const std::size_t unit = unit_of(tensor);
  if (units_[unit]->residence() == Residence::gathered) return;
  const std::lock_guard lock(mutex_);
  if (states_[unit].pins > 0) return;
  throw UsageError("torch::save() was given a parameter of the unit '{}', which is cut among the "
                   "ranks: write what full_state_dict() returns on the first rank, or save while "
                   "what full_parameters() returned lives",
                   units_[unit]->name());
}

std::size_t ParameterGatherer::unit_of(const at::Tensor& tensor) const {
  return by_memory_.at(tensor.storage().unsafeGetStorageImpl());
}

void ParameterGatherer::make_ready(std::size_t unit) {
  State& state = states_[unit];
  try {
    if (!units_[unit]->is_there()) start_gather(unit, comm::Launch::on_wait);
    if (state.arriving) {
      units_[unit]->finish_gather();
      state.arriving = false;
    }
  } catch (const CommError& error) {
    CommError::Details details = error.details();
    details.explanation = with_unit_names(std::move(details.explanation), units_);
    details.explanation += fmt::format(
        " This rank was about to use the unit '{}': every rank has to use the same units "
        "in the same order. Where ranks take different branches of a model, run all "
        "branches on every rank and multiply what is not wanted by 0, or put the "
        "branches into one unit (fsdp.units), or take SHARD_GRAD_OP, which keeps "
        "parameters whole",
        units_[unit]->name());
    throw CommError(std::move(details));
  }
  if (unit == last_used_) return;
  last_used_ = unit;
  std::erase(live_, unit);
  live_.push_back(unit);
  if (const auto next = order_.note(unit)) prefetch(*next);
}

void ParameterGatherer::start_gather(std::size_t unit, comm::Launch launch) {
  make_room();
  units_[unit]->take_memory();
  live_.push_back(unit);
  peak_live_ = std::max(peak_live_, live_.size());
  ++num_gathers_;
  try {
    units_[unit]->start_gather({.launch = launch, .subject = static_cast<std::int32_t>(unit)});
  } catch (...) {
    // As where memory for messages runs out: nothing has come, and nobody must take it for there.
    units_[unit]->give_memory_back(limits_.scrub_freed_memory);
    std::erase(live_, unit);
    throw;
  }
  states_[unit].arriving = true;
}

// For one more.
void ParameterGatherer::make_room() {
  for (std::size_t i = 0; i < live_.size() && live_.size() >= limits_.max_live_units;) {
    if (states_[live_[i]].pins > 0)
      ++i;
    else
      release(live_[i]);
  }
}

// Down to the limit again, where an operator or a caller has held more. What is on its way is about
// to be used.
void ParameterGatherer::trim() {
  for (std::size_t i = 0; i < live_.size() && live_.size() > limits_.max_live_units;) {
    const State& state = states_[live_[i]];
    if (state.pins > 0 || state.arriving)
      ++i;
    else
      release(live_[i]);
  }
}

// Where all the room is taken by what is in use, the next one has to wait.
void ParameterGatherer::prefetch(std::size_t unit) {
  if (units_[unit]->is_there()) return;
  const auto pinned =
      std::ranges::count_if(live_, [&](std::size_t live) { return states_[live].pins > 0; });
  if (static_cast<std::size_t>(pinned) >= limits_.max_live_units) return;
  start_gather(unit, comm::Launch::in_background);
}

void ParameterGatherer::release(std::size_t unit) {
  State& state = states_[unit];
  // Nobody has come for it: other ranks' bytes still arrive.
  if (state.arriving) units_[unit]->abandon_gather();
  state = {.pins = state.pins};
  units_[unit]->give_memory_back(limits_.scrub_freed_memory);
  std::erase(live_, unit);
  if (last_used_ == unit) last_used_ = kNone;
}

void ParameterGatherer::done_with(std::size_t unit) {
  const std::lock_guard lock(mutex_);
  if (units_[unit]->residence() == Residence::sharded && units_[unit]->is_there() &&
      states_[unit].pins == 0)
    release(unit);
}

void ParameterGatherer::release_all() {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < live_.size();) {
    if (states_[live_[i]].pins > 0)
      ++i;
    else
      release(live_[i]);
  }
}

void ParameterGatherer::await_arrivals(Deadline deadline) const {
  constexpr std::chrono::microseconds kPoll{50};
  const std::lock_guard lock(mutex_);
  const auto is_on_its_way = [&](std::size_t unit) {
    return states_[unit].arriving && !units_[unit]->gather_is_over();
  };
  while (std::ranges::any_of(live_, is_on_its_way) && !deadline.passed())
    std::this_thread::sleep_for(kPoll);
}

bool ParameterGatherer::is_held() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(states_, [](const State& state) { return state.pins > 0; });
}

void ParameterGatherer::start_step() {
  const std::lock_guard lock(mutex_);
  last_used_ = kNone;
  if (const auto first = order_.start_over()) prefetch(*first);
}

ParameterGatherer::Hold::Hold(ParameterGatherer& gatherer, Units units)
    : gatherer_(gatherer), units_(std::move(units)) {
  const std::lock_guard lock(gatherer_.mutex_);
  // All of them before any is gathered, which may make others go.
  for (const std::size_t unit : units_) ++gatherer_.states_[unit].pins;
  try {
    for (const std::size_t unit : units_)
      if (gatherer_.units_[unit]->residence() == Residence::sharded) gatherer_.make_ready(unit);
  } catch (...) {
    for (const std::size_t unit : units_) --gatherer_.states_[unit].pins;
    throw;
  }
}

ParameterGatherer::Hold::~Hold() {
  const std::lock_guard lock(gatherer_.mutex_);
  for (const std::size_t unit : units_) --gatherer_.states_[unit].pins;
  gatherer_.trim();
}

void ParameterGatherer::Hold::keep_edits() {
  for (const std::size_t unit : units_) gatherer_.units_[unit]->keep_edits();
}

}  // namespace lockstep::shard
