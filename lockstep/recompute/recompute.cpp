#include <lockstep/recompute/recompute.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/backward.h>
#include <lockstep/recompute/keep_results.h>
#include <lockstep/recompute/saved_tensor.h>

namespace lockstep::activations {

namespace {

// The second run: fills the slots that are wanted, in the order of the first run, and uses the
// results that the first run kept. Refers to both. Threading: one thread.
class SecondRun : public intercept::SavedTensorHooks, public ResultKeeper {
 public:
  SecondRun(std::vector<Slot>& slots, const std::vector<KeptResult>& results,
            const OperationKinds& kinds);

  // Calls the function under these hooks until the last wanted slot is filled. UsageError if it
  // does not do the same as the first time.
  void run(const std::function<void()>& function);

  std::unique_ptr<torch::autograd::SavedVariableHooks> make() override;

  bool keeps(OperationKind kind) const override { return kinds_.contains(kind); }
  at::Tensor result(OperationKind kind, const std::vector<at::Tensor>& arguments,
                    const std::function<at::Tensor()>& operation) override;

 private:
  class Saved;

  bool complete() const { return next_ >= end_; }
  void save(const at::Tensor& tensor);
  void end_if_complete() const;

  std::vector<Slot>& slots_;
  const std::vector<KeptResult>& results_;
  const OperationKinds& kinds_;
  std::size_t next_ = 0;  // the next slot
  std::size_t end_ = 0;   // behind the last slot to fill
  std::size_t next_result_ = 0;
};

// Thrown through a function that has computed everything that is wanted. It is no std::exception,
// so that handlers of errors do not catch it.
struct NothingMoreWanted {
  const SecondRun* run;
};

struct Value {
  at::Tensor tensor;
};

// Stands for the node of a result that was kept and not computed again: operators save only tensors
// with a node. The graph of a second run is not meant for backward.
class NotComputed : public torch::autograd::Function<NotComputed> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& /*with_gradient*/,
                            at::TensorList /*arguments*/, const Value& value) {
    return value.tensor.tensor_data();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw UsageError(
        "a function that is recomputed goes backward through a result that was kept, and so was "
        "not computed again: keep no results of that kind, or leave this function out");
  }
};

UsageError something_else(std::size_t second, std::size_t first) {
  return UsageError(
      "a function that is recomputed saved {} tensors for backward, and {} the first time: it must "
      "do the same whenever it is called",
      second, first);
}

// Keeps the tensor, too, because the function may go backward through values that it has just
// computed.
class SecondRun::Saved : public torch::autograd::SavedVariableHooks {
 public:
  explicit Saved(SecondRun& run) : run_(run) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    // The tensor's node is left out, because it would keep itself alive.
    tensor_ = tensor.tensor_data();
    if (!is_parameter(tensor)) run_.save(tensor_);
  }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  SecondRun& run_;
  at::Tensor tensor_;
};

SecondRun::SecondRun(std::vector<Slot>& slots, const std::vector<KeptResult>& results,
                     const OperationKinds& kinds)
    : slots_(slots), results_(results), kinds_(kinds) {
  for (std::size_t i = 0; i < slots.size(); ++i)
    if (slots[i].wanted && slots[i].recomputed()) end_ = i + 1;
}

std::unique_ptr<torch::autograd::SavedVariableHooks> SecondRun::make() {
  return std::make_unique<Saved>(*this);
}

void SecondRun::run(const std::function<void()>& function) {
  try {
    const intercept::HookScope hooks(*this);
    const KeeperScope keeper(kinds_.empty() ? nullptr : this);
    function();
  } catch (const NothingMoreWanted& end) {
    if (end.run != this) throw;
  }
  if (!complete()) throw something_else(next_, slots_.size());
}

void SecondRun::save(const at::Tensor& tensor) {
  end_if_complete();
  Slot& slot = slots_[next_];
  if (tensor.sizes() != slot.sizes || tensor.scalar_type() != slot.dtype)
    throw UsageError(
        "a function that is recomputed saved {} of {} for backward where it saved {} of {} the "
        "first time: it must do the same whenever it is called",
        c10::str(tensor.sizes()), c10::toString(tensor.scalar_type()),
        c10::str(at::IntArrayRef(slot.sizes)), c10::toString(slot.dtype));
  if (slot.wanted && slot.recomputed()) slot.tensor = tensor;
  ++next_;
  end_if_complete();
}

void SecondRun::end_if_complete() const {
  if (complete()) throw NothingMoreWanted{this};
}

at::Tensor SecondRun::result(OperationKind, const std::vector<at::Tensor>& arguments,
                             const std::function<at::Tensor()>& operation) {
  if (next_result_ == results_.size() || results_[next_result_].first_slot != next_)
    throw something_else(next_, slots_.size());
  const KeptResult& kept = results_[next_result_++];
  if (!kept.result.defined()) return operation();
  while (next_ < kept.end_slot) {
    const Slot& slot = slots_[next_];
    if (slot.part)
      save(slot.part->of(storage_of(arguments.at(slot.argument))));
    else
      ++next_;
  }
  end_if_complete();
  if (kept.generators) kept.generators->restore();
  const at::Tensor& value = kept.result.checked();
  if (!kept.requires_grad) return value;
  std::vector<at::Tensor> given;
  std::ranges::copy_if(arguments, std::back_inserter(given), &at::Tensor::defined);
  return NotComputed::apply(at::empty({0}).requires_grad_(), at::TensorList(given), Value{value});
}

thread_local int runs_again = 0;

}  // namespace

bool is_recomputing() { return runs_again > 0; }

// A node of the first run keeps this in place of a tensor: its number, or a parameter itself.
class Region::Number : public torch::autograd::SavedVariableHooks {
 public:
  explicit Number(std::shared_ptr<Region> region) : region_(std::move(region)) {}
  ~Number() override {
    if (packed_ && !parameter_.defined()) region_->forget(number_);
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    if (is_parameter(tensor))
      parameter_ = KeptTensor(tensor);
    else
      number_ = region_->add_slot(tensor);
    packed_ = true;
  }

  at::Tensor call_unpack_hook() override {
    return parameter_.defined() ? parameter_.checked() : region_->take(number_);
  }

 private:
  std::shared_ptr<Region> region_;
  std::size_t number_ = 0;
  bool packed_ = false;
  KeptTensor parameter_;
};

// An operation whose result is kept is one step of the first run. The arguments that it saves are
// taken from the second run's arguments; tensors that it made for itself are kept with its result.
class Region::FirstRun::Hooks : public intercept::SavedTensorHooks, public ResultKeeper {
 public:
  explicit Hooks(std::shared_ptr<Region> region) : region_(std::move(region)) {}

  std::unique_ptr<torch::autograd::SavedVariableHooks> make() override {
    return std::make_unique<Number>(region_);
  }

  bool keeps(OperationKind kind) const override { return region_->kinds_.contains(kind); }

  at::Tensor result(OperationKind kind, const std::vector<at::Tensor>& arguments,
                    const std::function<at::Tensor()>& operation) override {
    const std::size_t first = region_->slots_.size();
    at::Tensor value;
    {
      const InOperation scope{*region_, arguments};
      value = operation();
    }
    KeptResult kept{first, region_->slots_.size(), KeptTensor(value), value.requires_grad(), {}};
    if (kind == OperationKind::attention) kept.generators = GeneratorStates::now();
    region_->results_.push_back(std::move(kept));
    return value;
  }

 private:
  struct InOperation {
    InOperation(Region& region, const std::vector<at::Tensor>& arguments) : region(region) {
      region.arguments_ = &arguments;
    }
    ~InOperation() { region.arguments_ = nullptr; }
    Region& region;
  };

  std::shared_ptr<Region> region_;
};

// While it lives, all state is as the function found it the first time; afterwards it is as before,
// even if the function throws.
class Region::AsInFirstRun {
 public:
  explicit AsInFirstRun(const Region& region)
      : grad_(true),
        autocast_(region.autocast_),
        generators_now_(GeneratorStates::now()),
        buffers_now_(region.buffers_.now()),
        restore_now_(region.snapshot_ ? region.snapshot_() : nullptr) {
    region.generators_.restore();
    region.buffers_.restore();
    if (region.restore_) region.restore_();
    ++runs_again;
  }
  ~AsInFirstRun() {
    --runs_again;
    if (restore_now_) restore_now_();
    buffers_now_.restore();
    generators_now_.restore();
  }
  AsInFirstRun(const AsInFirstRun&) = delete;
  AsInFirstRun& operator=(const AsInFirstRun&) = delete;

 private:
  c10::AutoGradMode grad_;
  AutocastScope autocast_;
  GeneratorStates generators_now_;
  BufferValues buffers_now_;
  std::function<void()> restore_now_;
};

Region::Region(const std::vector<at::Tensor>& inputs, const Surroundings& surroundings,
               Function function)
    : function_(std::move(function)),
      watched_(inputs),
      generators_(GeneratorStates::now()),
      autocast_(AutocastState::now()),
      buffers_(surroundings.buffers),
      snapshot_(surroundings.snapshot),
      restore_(snapshot_ ? snapshot_() : nullptr),
      kinds_(kept_kinds()) {
  for (const at::Tensor& input : inputs) {
    inputs_.emplace_back(input, /*is_output=*/false);
    versions_.push_back(input.defined() ? input._version() : 0);
  }
}

Region::FirstRun::FirstRun(std::shared_ptr<Region> region)
    : region_(std::move(region)),
      hooks_(std::make_unique<Hooks>(region_)),
      scope_(*hooks_),
      keeper_(region_->kinds_.empty() ? nullptr : hooks_.get()) {}

Region::FirstRun::~FirstRun() {
  region_->watched_.clear();
  // An input that was changed in place belongs to a node that keeps the region alive.
  if (!finished_) region_->inputs_.clear();
}

void Region::FirstRun::finish() {
  const auto& inputs = region_->watched_;
  for (std::size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].defined() && inputs[i]._version() != region_->versions_[i])
      throw UsageError(
          "a function that is recomputed changed its input {} of shape {} in place, and could not "
          "be run again with what it was given: let it compute a new tensor",
          i, c10::str(inputs[i].sizes()));
  for (KeptResult& kept : region_->results_)
    if (kept.result.changed()) kept.result = {};
  region_->buffers_.drop_unchanged();
  finished_ = true;
}

std::size_t Region::add_slot(const at::Tensor& saved) {
  const std::lock_guard lock(mutex_);
  Slot slot{.sizes = c10::DimVector(saved.sizes()), .dtype = saved.scalar_type()};
  if (arguments_ != nullptr) {
    const auto argument = std::ranges::find_if(*arguments_, [&](const at::Tensor& argument) {
      return argument.defined() && argument.has_storage() && argument.is_alias_of(saved);
    });
    if (argument == arguments_->end()) {
      slot.kept = KeptTensor(saved);
    } else {
      slot.argument = static_cast<std::size_t>(argument - arguments_->begin());
      slot.part.emplace(saved);
    }
  }
  slots_.push_back(std::move(slot));
  return slots_.size() - 1;
}

at::Tensor Region::take(std::size_t number) {
  const std::lock_guard lock(mutex_);
  if (!slots_[number].recomputed()) return slots_[number].kept.checked();
  if (!slots_[number].tensor.defined()) run_again();
  return std::exchange(slots_[number].tensor, {});
}

void Region::forget(std::size_t number) {
  const std::lock_guard lock(mutex_);
  slots_[number].wanted = false;
  slots_[number].tensor.reset();
  slots_[number].kept = {};
}

void Region::drop_tensors() {
  const std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) slot.tensor.reset();
}

void Region::run_again() {
  if (inputs_.size() != versions_.size())
    throw UsageError("backward came to a function that is recomputed and did not end the first "
                     "time, but threw: use no tensors that it left behind");
  std::vector<at::Tensor> inputs;
  for (const auto& input : inputs_) inputs.push_back(input.unpack());

  {
    const AsInFirstRun state(*this);
    SecondRun(slots_, results_, kinds_).run([&] { function_(inputs); });
  }

  // Drops the tensors of nodes that this pass does not reach.
  torch::autograd::Engine::get_default_engine().queue_callback([region = weak_from_this()] {
    if (const auto alive = region.lock()) alive->drop_tensors();
  });
}

}  // namespace lockstep::activations
