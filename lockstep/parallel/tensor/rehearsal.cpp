#include <lockstep/parallel/tensor/rehearsal.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/call.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/nn/tensor_parallel/tensor_axis.h>

namespace lockstep::tensor {

namespace {

class OverAtOnce final : public comm::PendingCall {
 public:
  bool done() const override { return true; }
  void wait_on_host(Deadline) override {}
  void wait() override {}
};

comm::GroupInfo info_of(int num_ranks) {
  comm::GroupInfo info{.name = "rehearsal"};
  info.global_ranks.resize(static_cast<std::size_t>(num_ranks));
  std::iota(info.global_ranks.begin(), info.global_ranks.end(), 0);
  return info;
}

std::int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::int64_t bytes = 0;
  for (const at::Tensor& one : tensors) bytes += static_cast<std::int64_t>(one.nbytes());
  return bytes;
}

constexpr milliseconds kTimeout{1000};

}  // namespace

RehearsalGroup::RehearsalGroup(int num_ranks) : Communicator(info_of(num_ranks), kTimeout) {}

std::shared_ptr<comm::PendingCall> RehearsalGroup::do_start(comm::Call call) {
  const c10::NoGradGuard no_grad;
  switch (call.fingerprint.operation) {
    case comm::Operation::all_reduce:
      ++calls_.sums;
      calls_.summed_bytes += bytes_of(call.outputs);
      break;
    case comm::Operation::all_gather: {
      calls_.gathered_bytes += bytes_of(call.outputs);
      const at::Tensor& mine = call.inputs.front();
      if (call.outputs.size() == 1)
        call.outputs.front().view({size(), -1}).copy_(mine.view({1, -1}).expand({size(), -1}));
      else
        for (const at::Tensor& output : call.outputs) output.view({-1}).copy_(mine.view({-1}));
      break;
    }
    case comm::Operation::broadcast: break;
    default:
      throw UsageError("{} is no call of a tensor plan", comm::name(call.fingerprint.operation));
  }
  recorder().mark(call.flight_entry, flight::State::finished);
  return std::make_shared<OverAtOnce>();
}

std::shared_ptr<comm::Communicator> RehearsalGroup::do_split(const comm::SplitRequest&, Deadline) {
  throw UsageError("split is no call of a tensor plan");
}

at::Tensor RehearsalGroup::do_allocate(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, dtype);
}

namespace {

// Puts a model back as it was when this was made.
//
// Ownership: refers to the model. Failure: the destructor ends the process where LibTorch refuses
// to give a parameter its own memory back.
class Original {
 public:
  explicit Original(torch::nn::Module& model) : model_(model) {
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& parameter : model.parameters())
      parameters_.push_back({parameter, parameter.variable_data(),
                             torch::autograd::impl::version_counter(parameter), parameter.grad()});
    for (const at::Tensor& buffer : model.buffers()) buffers_.push_back({buffer, buffer.clone()});
    std::vector<c10::Device> devices = {at::kCPU};
    for (const Parameter& one : parameters_)
      if (one.tensor.is_cuda() && std::ranges::count(devices, one.tensor.device()) == 0)
        devices.push_back(one.tensor.device());
    for (const c10::Device& device : devices) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      const std::lock_guard lock(generator.mutex());
      generators_.push_back({generator, generator.clone()});
    }
  }
  ~Original() {
    const c10::NoGradGuard no_grad;
    forget_cuts(model_);
    for (const Parameter& one : parameters_) {
      one.tensor.mutable_grad() = at::Tensor();
      {
        const c10::impl::ExcludeDispatchKeyGuard unheard(intercept::kKey);
        one.tensor.set_data(one.data);
      }
      torch::autograd::impl::set_version_counter(one.tensor, one.version);
      if (one.gradient.defined()) one.tensor.mutable_grad() = one.gradient;
    }
    for (const auto& [buffer, values] : buffers_) buffer.copy_(values);
    for (auto& [generator, before] : generators_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(before.get_state());
    }
  }
  Original(const Original&) = delete;
  Original& operator=(const Original&) = delete;

 private:
  struct Parameter {
    at::Tensor tensor, data;
    c10::VariableVersion version;
    at::Tensor gradient;
  };

  static void forget_cuts(torch::nn::Module& module) {
    std::string record;
    for (const auto& item : module.named_children())
      if (dynamic_cast<const nn::CutRecord*>(item.value().get()) != nullptr)
        record = item.key();
      else
        forget_cuts(*item.value());
    if (!record.empty()) module.unregister_module(record);
  }

  torch::nn::Module& model_;
  std::vector<Parameter> parameters_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
  std::vector<std::pair<at::Generator, at::Generator>> generators_;
};

}  // namespace

Rehearsed rehearse(torch::nn::Module& model, const Plan& plan, int num_ranks,
                   const std::function<at::Tensor()>& step) {
  const auto group = std::make_shared<RehearsalGroup>(num_ranks);
  const Original original(model);
  Rehearsed rehearsed;
  std::shared_ptr<SplitOwner> owner;
  if (!plan.empty()) {
    parallelize_module(model, group, plan);
    for (const at::Tensor& parameter : model.parameters()) {
      if (is_cut(parameter)) owner = split_of(parameter)->owner;
      // Gradients that were there are those of the whole model.
      parameter.mutable_grad() = at::Tensor();
    }
    owner->gathers().trace();
  }
  for (const at::Tensor& parameter : model.parameters())
    rehearsed.parameter_bytes += static_cast<std::int64_t>(local_part(parameter).nbytes());
  group->forget_calls();
  const at::Tensor result = step();
  if (result.defined() && result.requires_grad()) result.sum().backward();
  if (owner != nullptr) {
    rehearsed.gathers = owner->gathers().all();
    rehearsed.uses = owner->gathers().uses();
  }
  rehearsed.calls = group->calls();
  return rehearsed;
}

std::string fault_of_plan(torch::nn::Module& model, const Plan& plan, int num_ranks) {
  try {
    check_plan(model, plan, RehearsalGroup(num_ranks));
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

}  // namespace lockstep::tensor
