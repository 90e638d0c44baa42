#include <lockstep/recompute/region.h>

#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>

#include <lockstep/base/error.h>
#include <lockstep/recompute/kept_tensor.h>

namespace lockstep::activations {

namespace {

thread_local int runs_again = 0;

// Thrown through a function that has no more to compute. No std::exception: handlers of errors
// have no business with it.
struct NothingMoreWanted {
  const void* run;
};

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

class Region::FirstRun::Hooks : public SavedTensorHooks {
 public:
  explicit Hooks(std::shared_ptr<Region> region) : region_(std::move(region)) {}
  std::unique_ptr<torch::autograd::SavedVariableHooks> make() override {
    return std::make_unique<Number>(region_);
  }

 private:
  std::shared_ptr<Region> region_;
};

// Fills the slots that are wanted, in the order of the first run.
class Region::SecondRun : public SavedTensorHooks {
 public:
  explicit SecondRun(std::vector<Slot>& slots) : slots_(slots) {
    for (std::size_t i = 0; i < slots.size(); ++i)
      if (slots[i].wanted) end_ = i + 1;
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> make() override {
    return std::make_unique<Kept>(*this);
  }

  bool complete() const { return next_ >= end_; }
  std::size_t num_saved() const { return next_; }

 private:
  // The function may go backward through what it has just computed.
  class Kept : public torch::autograd::SavedVariableHooks {
   public:
    explicit Kept(SecondRun& run) : run_(run) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      // Without its node, which would keep itself alive.
      tensor_ = tensor.tensor_data();
      if (!is_parameter(tensor)) run_.save(tensor_);
    }
    at::Tensor call_unpack_hook() override { return tensor_; }

   private:
    SecondRun& run_;
    at::Tensor tensor_;
  };

  void save(const at::Tensor& tensor) {
    if (next_ < end_) {
      Slot& slot = slots_[next_];
      if (tensor.sizes() != slot.sizes || tensor.scalar_type() != slot.dtype)
        throw UsageError(
            "a function that is recomputed saved {} of {} for backward where it saved {} of {} the "
            "first time: it must do the same whenever it is called",
            c10::str(tensor.sizes()), c10::toString(tensor.scalar_type()),
            c10::str(at::IntArrayRef(slot.sizes)), c10::toString(slot.dtype));
      if (slot.wanted) slot.tensor = tensor;
      ++next_;
    }
    if (complete()) throw NothingMoreWanted{this};
  }

  std::vector<Slot>& slots_;
  std::size_t next_ = 0;
  std::size_t end_ = 0;
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
      restore_(snapshot_ ? snapshot_() : nullptr) {
  for (const at::Tensor& input : inputs) {
    inputs_.emplace_back(input, /*is_output=*/false);
    versions_.push_back(input.defined() ? input._version() : 0);
  }
}

Region::FirstRun::FirstRun(std::shared_ptr<Region> region)
    : region_(std::move(region)), hooks_(std::make_unique<Hooks>(region_)), scope_(*hooks_) {}

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
  region_->buffers_.drop_unchanged();
  finished_ = true;
}

std::size_t Region::add_slot(const at::Tensor& saved) {
  const std::lock_guard lock(mutex_);
  slots_.push_back({.sizes = c10::DimVector(saved.sizes()), .dtype = saved.scalar_type()});
  return slots_.size() - 1;
}

at::Tensor Region::take(std::size_t number) {
  const std::lock_guard lock(mutex_);
  if (!slots_[number].tensor.defined()) run_again();
  return std::exchange(slots_[number].tensor, {});
}

void Region::forget(std::size_t number) {
  const std::lock_guard lock(mutex_);
  slots_[number].wanted = false;
  slots_[number].tensor.reset();
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

  SecondRun run(slots_);
  try {
    const AsInFirstRun state(*this);
    const HookScope scope(run);
    function_(inputs);
  } catch (const NothingMoreWanted& end) {
    if (end.run != &run) throw;
  }
  if (!run.complete())
    throw UsageError(
        "a function that is recomputed saved {} tensors for backward, and {} the first time: it "
        "must do the same whenever it is called",
        run.num_saved(), slots_.size());

  // Of nodes that this pass does not come to.
  torch::autograd::Engine::get_default_engine().queue_callback([region = weak_from_this()] {
    if (const auto alive = region.lock()) alive->drop_tensors();
  });
}

}  // namespace lockstep::activations
