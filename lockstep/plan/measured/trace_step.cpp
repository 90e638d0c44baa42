#include <lockstep/plan/measured/trace_step.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/device/live_bytes.h>
#include <lockstep/intercept/backward.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/optim/options/optimizer_options.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>

namespace lockstep::plan {

namespace {

using Parameters = std::vector<NamedTensor>;

// Writes events down in the order in which they come, from whichever threads backward runs on.
class Writer {
 public:
  explicit Writer(device::LiveBytes& live) : live_(live) {}

  void use(std::size_t parameter) { note(StepTrace::Kind::use, parameter, 0); }
  void gradient(std::size_t parameter, std::int64_t bytes) {
    note(StepTrace::Kind::gradient, parameter, bytes);
  }
  void end_forward() { trace_.saved_bytes = live_.now(); }
  StepTrace finish() {
    trace_.peak_bytes_after = live_.peak() - kept_;
    return std::move(trace_);
  }

 private:
  void note(StepTrace::Kind kind, std::size_t parameter, std::int64_t gradient_bytes) {
    const std::lock_guard lock(mutex_);
    trace_.events.push_back(
        {.kind = kind, .parameter = parameter, .peak_bytes = live_.peak() - kept_});
    kept_ += gradient_bytes;
    live_.reset_peak();
  }

  device::LiveBytes& live_;
  std::mutex mutex_;
  StepTrace trace_;
  std::int64_t kept_ = 0;  // gradients that have come
};

// Hears of every operator that reads a parameter, as what gathers sharded ones does.
class Reader final : public intercept::Owner {
 public:
  Reader(const Parameters& parameters, Writer& writer) : writer_(writer) {
    for (std::size_t i = 0; i < parameters.size(); ++i)
      numbers_.emplace(parameters[i].tensor.storage().unsafeGetStorageImpl(), i);
  }

  void on_call(intercept::Call& call, std::span<const intercept::Use> uses) override {
    for (const intercept::Use& use : uses)
      writer_.use(numbers_.at(use.tensor.storage().unsafeGetStorageImpl()));
    call.proceed();
  }

 private:
  Writer& writer_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> numbers_;
};

// Parameters lead to a reader for as long as this lives.
class ReadScope {
 public:
  ReadScope(const Parameters& parameters, std::shared_ptr<Reader> reader)
      : parameters_(parameters), reader_(std::move(reader)) {
    for (const NamedTensor& parameter : parameters_) {
      intercept::add_owner(parameter.tensor.storage(), reader_);
      intercept::tag(parameter.tensor);
    }
  }
  ~ReadScope() {
    for (const NamedTensor& parameter : parameters_) {
      intercept::untag(parameter.tensor);
      intercept::remove_owner(parameter.tensor.storage(), reader_.get());
    }
  }
  ReadScope(const ReadScope&) = delete;
  ReadScope& operator=(const ReadScope&) = delete;

 private:
  const Parameters& parameters_;
  std::shared_ptr<Reader> reader_;
};

// Gradients and buffers are as they were before, once this goes.
class AsBefore {
 public:
  AsBefore(const torch::nn::Module& module, const Parameters& parameters)
      : parameters_(parameters), buffers_(data_parallel::distinct_tensors(module.named_buffers())) {
    const c10::NoGradGuard no_grad;
    for (const NamedTensor& parameter : parameters_) {
      gradients_.push_back(parameter.tensor.grad());
      parameter.tensor.mutable_grad() = at::Tensor();
    }
    for (const NamedTensor& buffer : buffers_) values_.push_back(buffer.tensor.clone());
  }
  ~AsBefore() {
    const c10::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      parameters_[i].tensor.mutable_grad() = gradients_[i];
    for (std::size_t i = 0; i < buffers_.size(); ++i) buffers_[i].tensor.copy_(values_[i]);
  }
  AsBefore(const AsBefore&) = delete;
  AsBefore& operator=(const AsBefore&) = delete;

 private:
  const Parameters& parameters_;
  std::vector<at::Tensor> gradients_;
  Parameters buffers_;
  std::vector<at::Tensor> values_;
};

void check(const torch::nn::Module& module, const Parameters& parameters) {
  bool trains = false;
  for (const NamedTensor& parameter : parameters) {
    trains = trains || parameter.tensor.requires_grad();
    if (intercept::is_tagged(parameter.tensor))
      throw UsageError("'{}' of the module '{}' is cut among ranks already: estimate a model's "
                       "memory before wrap_model()",
                       parameter.name, module.name());
  }
  if (!trains)
    throw UsageError("the module '{}' has {} parameters and none of them requires a gradient: "
                     "there is nothing to train",
                     module.name(), parameters.size());
}

}  // namespace

StepTrace trace_step(torch::nn::Module& module, const std::function<at::Tensor()>& loss) {
  intercept::claim_key();
  const Parameters parameters = data_parallel::distinct_tensors(module.named_parameters());
  check(module, parameters);
  const AsBefore as_before(module, parameters);
  device::LiveBytes live(parameters.front().tensor.device());
  Writer writer(live);
  const ReadScope reads(parameters, std::make_shared<Reader>(parameters, writer));
  std::vector<std::unique_ptr<intercept::GradientHook>> hooks;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i].tensor;
    if (!parameter.requires_grad()) continue;
    hooks.push_back(std::make_unique<intercept::GradientHook>(
        parameter, [&writer, i, parameter](const at::Tensor&) {
          writer.gradient(i, static_cast<std::int64_t>(parameter.grad().nbytes()));
        }));
  }
  {
    const c10::AutoGradMode grad(true);
    const at::Tensor result = loss();
    if (!result.defined() || result.numel() != 1 || !result.requires_grad())
      throw UsageError("the loss of the module '{}' is no number that depends on parameters which "
                       "are trained: let the function return it as loss.backward() needs it",
                       module.name());
    writer.end_forward();
    result.backward();
  }
  return writer.finish();
}

MemoryEstimate estimate_memory(torch::nn::Module& module, const std::function<at::Tensor()>& loss,
                               const MemoryOptions& options, const shard::UnitPolicy& units) {
  const ModelSizes sizes = sizes_of(module, units);
  return estimate_memory(sizes, trace_step(module, loss), options);
}

ModelSizes sizes_of(const torch::nn::Module& module, const shard::UnitPolicy& policy) {
  ModelSizes sizes;
  std::unordered_map<const void*, std::size_t> unit_of;
  for (const shard::PlannedUnit& unit : shard::plan_units(module, policy)) {
    const at::Tensor& first = unit.parameters.front().tensor;
    for (const NamedTensor& parameter : unit.parameters)
      unit_of[parameter.tensor.unsafeGetTensorImpl()] = sizes.units.size();
    sizes.units.push_back({.num_elements = unit.num_elements(),
                           .element_bytes = static_cast<std::int64_t>(first.element_size()),
                           .trained = first.requires_grad()});
  }
  for (const auto& [name, tensor] : data_parallel::distinct_tensors(module.named_parameters()))
    sizes.parameters.push_back(
        {.num_elements = tensor.numel(),
         .unit = unit_of.at(tensor.unsafeGetTensorImpl()),
         .matrix_rows = optim::is_hidden_matrix(name, tensor.sizes()) ? tensor.size(0) : 0});
  for (const NamedTensor& buffer : data_parallel::distinct_tensors(module.named_buffers()))
    sizes.buffer_bytes += static_cast<std::int64_t>(buffer.tensor.nbytes());
  return sizes;
}

}  // namespace lockstep::plan
