#include <lockstep/parallel/data_parallel/gradient_exchange.h>

#include <algorithm>
#include <array>
#include <exception>
#include <string_view>
#include <utility>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>

namespace lockstep::data_parallel {

namespace {

// Operators that write to a tensor and cannot be a step of an optimizer: they fill all or some of
// it with values of their own, keep the old ones in bounds, or change no value.
constexpr std::array kNoStep = std::to_array<std::string_view>(
    {"fill_",        "zero_",        "normal_",     "uniform_",       "random_",
     "bernoulli_",   "exponential_", "geometric_",  "cauchy_",        "log_normal_",
     "clamp_",       "clamp_min_",   "clamp_max_",  "clip_",          "nan_to_num_",
     "masked_fill_", "index_fill_",  "renorm_",     "fill_diagonal_", "embedding_renorm_",
     "resize_",      "resize_as_",   "detach_",     "retain_grad",    "requires_grad_",
     "rename_",      "t_",           "transpose_",  "squeeze_",       "unsqueeze_",
     "swapaxes_",    "swapdims_",    "as_strided_", "record_stream"});

// Operators that put a caller's values in place of the old ones, as loading a model does, and as a
// step of somebody's own may.
constexpr std::array kReplace = std::to_array<std::string_view>(
    {"copy_", "set_", "set_data", "masked_scatter_", "index_copy_"});

// set_data() is no operator itself, but calls this one before it does anything.
constexpr std::array kSetData =
    std::to_array<std::string_view>({"_has_compatible_shallow_copy_type"});

template <std::size_t size>
bool is_any_of(const std::array<std::string_view, size>& names, const intercept::Call& call) {
  std::string_view name = call.op().operator_name().name;
  if (constexpr std::string_view kOwn = "aten::"; name.starts_with(kOwn))
    name.remove_prefix(kOwn.size());
  return std::ranges::find(names, name) != names.end();
}

// Whether what the operator writes to is an out= argument: its old values count for nothing, unless
// it is an argument, too.
bool writes_to_out(const intercept::Call& call) {
  return std::ranges::any_of(call.op().schema().arguments(), [](const c10::Argument& argument) {
    const auto* const alias = argument.alias_info();
    return argument.kwarg_only() && alias != nullptr && alias->isWrite();
  });
}

const c10::Storage& memory_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage();
}

// Parameters may lie side by side in one memory.
bool is_part_of(const at::Tensor& tensor, const at::Tensor& parameter) {
  return memory_of(tensor).unsafeGetStorageImpl() == memory_of(parameter).unsafeGetStorageImpl() &&
         tensor.storage_offset() >= parameter.storage_offset() &&
         tensor.storage_offset() < parameter.storage_offset() + parameter.numel();
}

}  // namespace

WriteGuard::WriteGuard(std::vector<NamedTensor> parameters,
                       std::function<void(const UsageError&)> on_refusal)
    : on_refusal_(std::move(on_refusal)) {
  all_.reserve(parameters.size());
  for (NamedTensor& parameter : parameters)
    all_.push_back(Watched{.parameter = std::move(parameter)});
}

WriteGuard::~WriteGuard() {
  try {
    end();
  } catch (const std::exception& error) {
    log::warn("operators on parameters of a model that is no longer spread over ranks go on being "
              "intercepted: {}",
              error.what());
  }
}

void WriteGuard::watch() {
  intercept::claim_key();
  // Gradients that were dropped wait no more.
  for (Watched& one : all_)
    if (one.waits && !one.parameter.tensor.grad().defined()) one.waits = false;
  if (std::ranges::none_of(all_, &Watched::waits)) num_passes_ = 0;
  for (Watched& one : all_) {
    const at::Tensor& parameter = one.parameter.tensor;
    const c10::Storage& memory = memory_of(parameter);
    const bool is_tagged = intercept::is_tagged(parameter);
    if (is_tagged && one.memory._unsafe_get_target() == memory.unsafeGetStorageImpl()) continue;
    if (!is_tagged) {
      intercept::tag(parameter);
      one.tagged_here = true;
    }
    intercept::add_owner(memory, shared_from_this(), {}, intercept::Turn::first);
    one.memory = memory.getWeakStorageImpl();
  }
  is_watching_ = true;
}

void WriteGuard::note_gradient(std::size_t parameter) {
  all_[parameter].waits = true;
  if (std::exchange(is_noted_, true)) return;
  ++num_passes_;
  ++num_unsummed_;
}

void WriteGuard::forget_writes() {
  for (Watched& one : all_) one.replaced_after = 0;
}

void WriteGuard::end() {
  num_passes_ = num_unsummed_ = 0;
  for (Watched& one : all_) one.waits = false;
  forget_writes();
  if (!std::exchange(is_watching_, false)) return;
  for (Watched& one : all_) {
    const at::Tensor& parameter = one.parameter.tensor;
    if (auto memory = one.memory.lock()) intercept::remove_owner(std::move(memory), this);
    one.memory = c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>());
    if (std::exchange(one.tagged_here, false) && intercept::is_tagged(parameter))
      intercept::untag(parameter);
  }
}

void WriteGuard::on_call(intercept::Call& call, std::span<const intercept::Use> uses) {
  if (num_passes_ > 0) {
    if (is_any_of(kSetData, call)) {
      const at::Tensor& tensor = call.arguments()[0].toTensor();
      if (memory_of(tensor).unsafeGetStorageImpl() !=
          memory_of(call.arguments()[1].toTensor()).unsafeGetStorageImpl())
        if (Watched* const one = waiting_at(tensor)) note_replacement(call, *one);
    }
    for (const intercept::Use& use : uses) {
      if (!use.written) continue;
      if (is_any_of(kNoStep, call)) continue;
      const bool is_read = std::ranges::any_of(uses, [&](const intercept::Use& other) {
        return !other.written && is_part_of(use.tensor, other.tensor);
      });
      if (!is_read && writes_to_out(call)) continue;
      Watched* const one = waiting_at(use.tensor);
      if (one == nullptr) continue;
      if (is_any_of(kReplace, call))
        note_replacement(call, *one);
      else
        refuse_step(call, *one);
    }
  }
  call.proceed();
}

// A gradient of zeros is the same on every rank, as zero_grad() leaves it with LibTorch 1.
WriteGuard::Watched* WriteGuard::waiting_at(const at::Tensor& written) {
  for (Watched& one : all_) {
    if (!one.waits || !is_part_of(written, one.parameter.tensor)) continue;
    const at::Tensor& gradient = one.parameter.tensor.grad();
    if (!gradient.defined()) continue;
    // To look into a gradient that is cut over ranks would need the others.
    if (intercept::is_tagged(gradient) || gradient.any().item<bool>()) return &one;
  }
  return nullptr;
}

void WriteGuard::refuse(const UsageError& error) const {
  on_refusal_(error);
  throw error;
}

void WriteGuard::refuse_step(const intercept::Call& call, const Watched& one) const {
  refuse(UsageError(
      "{} was about to change '{}' on this rank alone: the gradients of {} backward {} under "
      "no_sync() have not been summed over the ranks yet, and an optimizer that steps on them "
      "would train each rank by itself. Leave the last backward pass before a step out of "
      "no_sync(), or call zero_grad() first where the gradients are not wanted",
      call.op().operator_name().name, one.parameter.name, num_passes_,
      num_passes_ == 1 ? "pass" : "passes"));
}

// Loading a model replaces a parameter once, or several times in a row.
void WriteGuard::note_replacement(const intercept::Call& call, Watched& one) const {
  if (one.replaced_after == 0 || one.replaced_after == num_unsummed_) {
    one.replaced_after = num_unsummed_;
    return;
  }
  refuse(UsageError(
      "'{}' was about to be given other values on this rank alone ({}), and has been before, "
      "between {} backward passes under no_sync() whose gradients were never summed over the "
      "ranks: steps on them would train each rank by itself. Leave the last backward pass before "
      "a step out of no_sync(); values are kept in bounds by operators that work in place, such "
      "as clamp_ and renorm_",
      one.parameter.name, call.op().operator_name().name, num_unsummed_));
}

}  // namespace lockstep::data_parallel
