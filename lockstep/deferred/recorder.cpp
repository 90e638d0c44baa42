#include <lockstep/deferred/recorder.h>

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/deferred/operator_traits.h>
#include <lockstep/deferred/record.h>
#include <lockstep/intercept/owner.h>

namespace lockstep::deferred {

namespace {

constexpr auto kGone =
    "a tensor was used whose values had been put off, after the Construction that could have "
    "computed them was gone: keep it until the values of all tensors have been asked for";

}  // namespace

at::Tensor Contents::make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                          const std::shared_ptr<intercept::Owner>& owner) {
  const auto type = c10::scalarTypeToTypeMeta(dtype);
  const auto memory = std::make_shared<Memory>();
  memory->bytes = at::detail::computeStorageNbytes(sizes, strides, type.itemsize());
  memory->sizes = sizes.vec();
  memory->dtype = dtype;
  c10::Storage storage = make_storage(memory, account_, touches_);
  if (!storage) return {};
  memories_.push_back(memory);
  intercept::add_owner(storage, owner, kGone);
  const auto keys = c10::DispatchKeySet(c10::DispatchKey::CPU).add(intercept::kKey);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, type);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

std::optional<LivingMemory> Contents::of(const at::Tensor& tensor) const {
  const Place* const place = place_of(tensor);
  if (place == nullptr || place->account() != account_ || place->memory()->plain)
    return std::nullopt;
  return LivingMemory{place->memory(), tensor.storage()};
}

LivingMemories Contents::all() const {
  LivingMemories all;
  for (const auto& known : memories_) {
    const auto memory = known.lock();
    if (!memory || memory->plain) continue;
    if (auto storage = memory->storage.lock()) all.push_back({memory, std::move(storage)});
  }
  return all;
}

void Contents::hold(const LivingMemories& memories) {
  LivingMemories empty;
  for (const LivingMemory& living : memories) {
    heed_touch(living);
    if (living.memory->holders == 0 && !living.memory->plain) empty.push_back(living);
  }
  for (const LivingMemory& living : empty) place_of(living.storage)->take();
  try {
    std::vector<const Memory*> targets;
    for (const LivingMemory& living : empty) targets.push_back(living.memory.get());
    replay(log_, targets, *account_);
  } catch (...) {
    for (const LivingMemory& living : empty) place_of(living.storage)->give_back();
    throw;
  }
  for (const LivingMemory& living : memories) ++living.memory->holders;
}

void Contents::release(const LivingMemories& memories) noexcept {
  for (const auto& [memory, storage] : memories)
    if (--memory->holders == 0 && !memory->plain) place_of(storage)->give_back();
}

void Contents::keep(const LivingMemories& memories) {
  hold(memories);
  for (const LivingMemory& living : memories) leave_to_tensors(living);
}

void Contents::leave_to_tensors(const LivingMemory& living) {
  living.memory->plain = true;
  intercept::remove_owner(living.storage, &owner_);
}

void Contents::heed_touch(const LivingMemory& living) {
  Place& place = *place_of(living.storage);
  if (living.memory->holders > 0 || !place.touched()) return;
  if (living.memory->blank) {
    place.take();
    leave_to_tensors(living);
  } else {
    touches_->note(living.memory);
    place.wipe();
  }
}

std::unique_ptr<WatchedConstructor> Contents::watch() {
  // Touches from before this constructor are not its own.
  for (const LivingMemory& living : all()) heed_touch(living);
  return std::make_unique<WatchedConstructor>(touches_);
}

void Contents::check_touches() {
  for (const LivingMemory& living : all()) heed_touch(living);
  if (const auto touched = touches_->first())
    throw UsageError(
        "the constructor used values through a pointer (data_ptr or an accessor) which had been "
        "put off, those of a tensor of type {} and shape [{}]: use LibTorch's operators on it, or "
        "construct the model plainly",
        c10::toString(touched->dtype), fmt::join(touched->sizes, ", "));
}

void Contents::forget_unneeded() {
  std::vector<const Memory*> memories;
  for (const LivingMemory& living : all()) memories.push_back(living.memory.get());
  log_.forget_all_but(memories);
  std::erase_if(memories_, [](const auto& known) { return known.expired(); });
}

namespace {

bool is_for_autograd(intercept::Call& call) {
  if (!c10::GradMode::is_enabled() || !call.keys().has_any(c10::autograd_dispatch_keyset))
    return false;
  bool requires_grad = false;
  for (const c10::IValue& argument : call.arguments())
    for_each_tensor(argument, [&](const at::Tensor& tensor, auto) {
      requires_grad = requires_grad || tensor.requires_grad();
    });
  return requires_grad;
}

// Under autocast the result of such an operator depends on more than its arguments.
bool is_for_autocast(const intercept::Call& call) {
  return call.keys().has_any(c10::autocast_dispatch_keyset) &&
         call.op().hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU);
}

bool has_outputs(const c10::OperatorHandle& op) {
  for (std::size_t i = 0; i < op.schema().arguments().size(); ++i)
    if (is_out(op, i)) return true;
  return false;
}

// LibTorch resizes an output that has another shape than the result, and may give it other memory.
bool keeps_shapes(const intercept::Call& call, const InferredShapes& inferred) {
  for (std::size_t i = 0; i < inferred.arguments.size(); ++i) {
    if (!is_out(call.op(), i) || !call.arguments()[i].isTensor()) continue;
    if (call.arguments()[i].toTensor().sizes() != inferred.arguments[i].toTensor().sizes())
      return false;
  }
  return true;
}

// Whether the operator can run later: as far as can be told, its arguments fit together, so it
// would not throw now.
bool can_wait(const intercept::Call& call) {
  const InferredShapes inferred = infer_shapes(call.op(), call.arguments());
  if (inferred.outcome == InferredShapes::Outcome::unknown) return !has_outputs(call.op());
  return inferred.outcome == InferredShapes::Outcome::known && keeps_shapes(call, inferred);
}

void return_from(intercept::Call& call, torch::jit::Stack results) {
  torch::jit::drop(call.stack(), call.arguments().size());
  for (c10::IValue& result : results) call.stack().push_back(std::move(result));
}

// Gives the written arguments a new version and returns them, as the operator would.
void return_written_arguments(intercept::Call& call) {
  const auto& schema = call.op().schema();
  torch::jit::Stack results;
  for (const c10::Argument& returned : schema.returns())
    for (std::size_t i = 0; i < schema.arguments().size(); ++i)
      if (is_written(call.op(), i) &&
          schema.arguments()[i].alias_info()->beforeSets() == returned.alias_info()->beforeSets()) {
        results.push_back(call.arguments()[i]);
        break;
      }
  for (std::size_t i = 0; i < schema.arguments().size(); ++i)
    if (is_written(call.op(), i))
      for_each_tensor(call.arguments()[i], [](const at::Tensor& tensor, auto) {
        if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
      });
  return_from(call, std::move(results));
}

bool writes_to_held_memory(const Record& record) {
  return std::ranges::any_of(record.outputs(),
                             [](const Memory* memory) { return memory->holds_content(); });
}

}  // namespace

Recorder::Recorder(std::size_t smallest_bytes) : smallest_bytes_(smallest_bytes) {
  intercept::claim_key();
}

at::Tensor Recorder::make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const auto bytes = static_cast<std::size_t>(c10::multiply_integers(sizes)) *
                     c10::scalarTypeToTypeMeta(dtype).itemsize();
  if (bytes < smallest_bytes_) return {};
  const std::lock_guard lock(mutex_);
  return make_deferred(sizes, strides, dtype);
}

at::Tensor Recorder::make_deferred(at::IntArrayRef sizes, at::IntArrayRef strides,
                                   at::ScalarType dtype) {
  const bool has_elements = c10::multiply_integers(sizes) > 0;
  if (!has_elements || addresses_ran_out_) return {};
  at::Tensor tensor = contents_.make(sizes, strides, dtype, shared_from_this());
  if (!tensor.defined()) {
    addresses_ran_out_ = true;
    log::warn(
        "the system gives no addresses without memory for them (see vm.overcommit_memory, "
        "ulimit -v and mlockall): from here on, the model's tensors take memory as they are made");
  }
  return tensor;
}

void Recorder::on_save(const at::Tensor& tensor) const {
  const std::lock_guard lock(mutex_);
  const auto living = contents_.of(tensor);
  if (!living || living->memory->blank || living->memory->holds_content()) return;
  throw UsageError("torch::save() was given a tensor of shape [{}] whose values are put off until "
                   "the model is there: save it after build_model(), or a clone() of it",
                   fmt::join(tensor.sizes(), ", "));
}

void Recorder::on_call(intercept::Call& call, std::span<const intercept::Use> uses) {
  if (decomposes(call.op())) {
    call.decompose();
    return;
  }
  const PlainFactories inside;
  if (touches_no_element(call.op())) {
    call.proceed();
    return;
  }
  LivingMemories held;
  {
    const std::lock_guard lock(mutex_);
    LivingMemories used;
    LivingMemories written;
    for (const intercept::Use& use : uses) {
      const auto living = contents_.of(use.tensor);
      if (!living) continue;
      contents_.heed_touch(*living);
      if (living->memory->plain) continue;
      used.push_back(*living);
      if (use.written) written.push_back(*living);
    }
    const Run run = put_off(call, used);
    if (run == Run::no) return;
    if (run == Run::now) {
      contents_.keep(written);
      std::erase_if(used, [](const LivingMemory& living) { return living.memory->plain; });
      contents_.hold(used);
    }
    held = std::move(used);
  }
  const Hold hold(shared_from_this(), std::move(held));
  call.proceed();
}

Recorder::Run Recorder::put_off(intercept::Call& call, LivingMemories& used) {
  if (used.empty() || is_for_autograd(call) || is_for_autocast(call)) return Run::now;
  const bool writes = only_writes_arguments(call.op());
  const bool computes = only_returns_new_tensors(call.op()) && FactoryScope::current() == this;
  if (!writes && !computes) return Run::now;
  auto record = capture(call.op(), call.arguments(), &contents_.account());
  if (!record) return Run::now;
  return writes ? put_off_writes(call, std::move(*record), used)
                : put_off_computation(call, std::move(*record));
}

Recorder::Run Recorder::put_off_writes(intercept::Call& call, Record record, LivingMemories& used) {
  const bool random = is_random(call.op());
  if (random ? !RandomDraws::can_draw(call.op(), call.arguments()) : !can_wait(call))
    return Run::now;
  if (writes_to_held_memory(record)) {
    // The memories are held before the record is added, because the operator must see their content
    // as it is now.
    contents_.hold(used);
    if (random) record.generator = state_of_generator(call.op(), call.arguments());
    contents_.log().append(std::move(record));
    return Run::now_as_well;
  }
  if (random) record.generator = draws_.draw(call.op(), call.arguments());
  contents_.log().append(std::move(record));
  return_written_arguments(call);
  return Run::no;
}

Recorder::Run Recorder::put_off_computation(intercept::Call& call, Record record) {
  if (is_random(call.op())) return Run::now;
  const InferredShapes inferred = infer_shapes(call.op(), call.arguments());
  if (inferred.outcome != InferredShapes::Outcome::known) return Run::now;
  torch::jit::Stack results;
  for (const c10::IValue& value : inferred.results) {
    const at::Tensor& shape = value.toTensor();
    if (!shape.defined()) return Run::now;
    at::Tensor result = make_deferred(shape.sizes(), shape.strides(), shape.scalar_type());
    if (!result.defined()) return Run::now;
    record.results.emplace_back(result);
    results.emplace_back(std::move(result));
  }
  contents_.log().append(std::move(record));
  return_from(call, std::move(results));
  return Run::no;
}

Hold::Hold(std::shared_ptr<Recorder> recorder, LivingMemories memories)
    : recorder_(std::move(recorder)), memories_(std::move(memories)) {}

Hold::~Hold() {
  if (memories_.empty()) return;
  recorder_->with_contents([&](Contents& contents) { contents.release(memories_); });
}

}  // namespace lockstep::deferred
