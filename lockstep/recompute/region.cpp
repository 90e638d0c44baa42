#include <lockstep/recompute/region.h>

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <lockstep/base/error.h>
#include <lockstep/recompute/kept_tensor.h>
#include <lockstep/recompute/second_run.h>

namespace lockstep::activations {

namespace {

thread_local int runs_again = 0;

}  // namespace

bool is_recomputing() { return runs_again > 0; }

// What a node of the first run keeps of a tensor.
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

// An operation whose result is kept is one step of the first run: what it saves of its arguments
// will be taken from those again, and what it made for itself is kept with its result.
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

// Everything as the function found it, and afterwards as it was before, also if the function
// throws.
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
  // An input that was changed in place is a result of a node that keeps the region.
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

  // Of nodes that this pass does not come to.
  torch::autograd::Engine::get_default_engine().queue_callback([region = weak_from_this()] {
    if (const auto alive = region.lock()) alive->drop_tensors();
  });
}

}  // namespace lockstep::activations
