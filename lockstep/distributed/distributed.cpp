#include <lockstep/distributed/distributed.h>

#include <algorithm>
#include <chrono>
#include <span>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <spdlog/fmt/ranges.h>
#include <torch/nn/module.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/checkpoint/safetensors/content_hash.h>
#include <lockstep/comm/communicator.h>
#include <lockstep/comm/world/join.h>
#include <lockstep/deferred/construction.h>
#include <lockstep/distributed/axes/job_axes.h>
#include <lockstep/distributed/config_rules.h>
#include <lockstep/distributed/make_parallel.h>
#include <lockstep/distributed/model_parts.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/intercept/backward.h>
#include <lockstep/mesh/device_mesh.h>
#include <lockstep/nn/layers/autocast_operators.h>
#include <lockstep/nn/tensor_parallel/tensor_parallel.h>
#include <lockstep/nn/tensor_parallel/tensor_plan.h>
#include <lockstep/parallel/data_parallel/agreement.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>
#include <lockstep/parallel/data_parallel/parallel_model.h>
#include <lockstep/parallel/replicate/sync_batch_norm.h>

namespace lockstep {

namespace {

// Every rank of a pipeline calls it with what it was given as its stage. UsageError on all of them
// where all have the same parameters: each would train a whole model on its own, and all of them
// the same one.
void check_stages_differ(const torch::nn::Module& stage, comm::Communicator& group) {
  std::vector<std::string> lines;
  for (const auto& item : stage.named_parameters())
    lines.push_back(fmt::format("{} [{}]", item.key(), fmt::join(item.value().sizes(), ", ")));
  if (group.size() == 1 || data_parallel::first_difference(lines, group)) return;
  throw UsageError(
      "all {} ranks of the pipeline wrap the same parameters ('{}' and so on), so that each would "
      "train the whole model and none a stage of it: give wrap_model() only the layers of this "
      "rank's stage, under the names that they have in the whole model, and run them with "
      "pipeline::Pipeline; or take ParallelMode::DDP or FSDP",
      group.size(), lines.empty() ? "" : stage.named_parameters().front().key());
}

constexpr std::int64_t kMeasuredBytes = 1 << 20;

std::vector<int> hosts_of_all(comm::Communicator& world, int host) {
  const at::Tensor hosts = at::zeros({world.size()}, at::kLong);
  hosts[world.rank()].fill_(host);
  world.all_reduce(hosts).wait();
  return {hosts.data_ptr<std::int64_t>(), hosts.data_ptr<std::int64_t>() + hosts.numel()};
}

// The time of the second of two sums: the first may set up connections.
double milliseconds_of_sum(comm::Communicator& group, c10::Device device) {
  const at::Tensor numbers = at::zeros({kMeasuredBytes / 4}, at::dtype(at::kFloat).device(device));
  double taken = 0;
  for (int time = 0; time < 2; ++time) {
    group.barrier().wait_on_host();
    const auto start = std::chrono::steady_clock::now();
    group.all_reduce(numbers).wait_on_host();
    taken =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  }
  return taken;
}

// Where the ranks of a group along "tp" are on several hosts, one rank of the job warns, with how
// long these take for a sum. Every rank calls it; `host` is the number of its own, `device` its
// tensors are on.
void warn_of_tensor_axis_across_hosts(const mesh::DeviceMesh& mesh, int host, c10::Device device) {
  const auto crossing = host_crossing(mesh.shape(), "tp", hosts_of_all(*mesh.world(), host));
  if (!crossing) return;
  const auto& group = mesh.axis("tp");
  const double taken = milliseconds_of_sum(*group, device);
  if (mesh.rank() != crossing->ranks.front()) return;
  log::warn(
      "the tensor axis reaches over hosts ({}{}): each layer that is cut waits for the "
      "network twice forward and twice backward, and a sum of 1 MiB takes {:.2f} ms here. {}; "
      "pipeline and data are for what lies between hosts",
      to_text(*crossing),
      crossing->num_groups > 1 ? fmt::format(", and {} more", crossing->num_groups - 1) : "", taken,
      crossing->inside > 1
          ? fmt::format("With tensor {} it stays inside of hosts", crossing->inside)
          : "Give hosts a number of ranks that a tensor axis divides, or leave tensor at 1");
}

}  // namespace

struct DistributedManager::State {
  struct Wrapped {
    std::weak_ptr<torch::nn::Module> module;
    ModelParts parts;
    std::unique_ptr<data_parallel::ParallelModel> parallel;
  };

  DistributedConfig config;
  int local_rank;
  device::DeviceManager device_manager;
  std::shared_ptr<comm::Communicator> world;
  JobAxes axes;
  mesh::DeviceMesh mesh;
  std::vector<Wrapped> models;
  data_parallel::CountedPass counted_pass =
      std::make_shared<data_parallel::CountedPass::element_type>(nullptr);
  std::vector<std::unique_ptr<replicate::SyncBatchNorm>> batch_norms;

  // Null where it is not wrapped.
  Wrapped* find(const torch::nn::Module* module);
  // UsageError where it is not wrapped.
  Wrapped& wrapped(const ModelRef& model);
  // UsageError where something was done to the model that would train it on each rank by itself,
  // too. Looking for that takes a while where it has many parameters: what looks itself, or asks
  // for one number, uses wrapped().
  Wrapped& checked(const ModelRef& model);

  bool belongs_to_wrapped(const at::Tensor& parameter) const;
  void check_new(const torch::nn::Module* module);
  void check_not_empty(const torch::nn::Module& module) const;
  tensor::Plan plan_of_stage(const torch::nn::Module& module);
  // With `defer`, of a model that was constructed without memory.
  void cut_by_plan(torch::nn::Module& module, const tensor::internal::Defer* defer);
  void cut_layers(torch::nn::Module& module, const tensor::internal::Defer* defer = nullptr);
  void add(const std::shared_ptr<torch::nn::Module>& module, const shard::Origin& origin);

  // Only ranks that have the first samples have anything to join, or to take apart.
  bool is_first_of_data() const;
  std::vector<NamedTensor> joined(const ModelParts& parts, std::vector<NamedTensor> mine,
                                  ModelParts::Names names, const StateDictOptions& options) const;
  std::vector<NamedTensor> own_parts(const ModelParts& parts,
                                     const std::vector<NamedTensor>& wanted,
                                     const std::vector<NamedTensor>& whole,
                                     ModelParts::Names names) const;
};

namespace {

// Collectives of an engine that takes only GPU tensors, and the models, use the current device.
device::DeviceManager choose_device(const DistributedConfig& config) {
  // Collectives of several groups wait for their peers on the GPU: a queue of its own for each of
  // their streams keeps them out of each other's way. CUDA reads it when it starts.
  set_environment_default("CUDA_DEVICE_MAX_CONNECTIONS", "32");
  const auto manager =
      device::DeviceManager::auto_detect({.gpu_use = config.gpu_use, .type = config.device_type});
  const c10::Device device = manager.device();
  if (device.has_index()) c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  const LaunchEnvironment job = read_launch_environment();
  if (device.is_cuda() && job.local_world_size > manager.num_devices() && job.local_rank == 0)
    log::warn(
        "{} ranks share {} GPU{} of this host: the answer is the same, a GPU for each rank is "
        "faster",
        job.local_world_size, manager.num_devices(), manager.num_devices() == 1 ? "" : "s");
  return manager;
}

}  // namespace

DistributedManager setup_distributed(const DistributedConfig& asked_for) {
  check(asked_for);
  auto device_manager = choose_device(asked_for);
  if (asked_for.autocast_operators && device_manager.device().is_cuda())
    nn::register_autocast_operators();
  auto world = comm::join_world({.backend = asked_for.backend,
                                 .device = device_manager.device(),
                                 .timeout = asked_for.timeout});
  check_told_the_same(lines_of(asked_for), RankMessages(world));
  const DistributedConfig config = sized_for(asked_for, world->size());
  const LaunchEnvironment job = read_launch_environment();
  JobAxes axes = axes_for(config, {.world = world->size(), .of_host = job.local_world_size});
  mesh::DeviceMesh mesh(world, axes.axes, {.flatten = joint_groups(axes)});
  DistributedManager manager(std::make_shared<DistributedManager::State>(
      DistributedManager::State{.config = config,
                                .local_rank = job.local_rank,
                                .device_manager = std::move(device_manager),
                                .world = std::move(world),
                                .axes = std::move(axes),
                                .mesh = std::move(mesh),
                                .models = {},
                                .batch_norms = {}}));
  if (config.model_parallel.tensor > 1 && job.num_nodes > 1)
    warn_of_tensor_axis_across_hosts(manager.mesh(), job.node_rank, manager.device());
  return manager;
}

DistributedManager::State::Wrapped* DistributedManager::State::find(
    const torch::nn::Module* module) {
  // Gives back what models had of which nothing is left: buckets of gradients, groups of ranks.
  std::erase_if(models, [](const Wrapped& one) { return !one.parallel->any_part_lives(); });
  std::erase_if(batch_norms, [](const auto& norms) { return norms->expired(); });
  const auto found = std::ranges::find_if(
      models, [&](const Wrapped& one) { return one.module.lock().get() == module; });
  return found == models.end() ? nullptr : &*found;
}

DistributedManager::State::Wrapped& DistributedManager::State::wrapped(const ModelRef& model) {
  if (model.module() == nullptr)
    throw UsageError("there is no model: pass what wrap_model() returned");
  if (auto* const found = find(model.module().get())) return *found;
  throw UsageError("this '{}' is not spread over the ranks: pass what wrap_model() returned",
                   model.module()->name());
}

DistributedManager::State::Wrapped& DistributedManager::State::checked(const ModelRef& model) {
  Wrapped& found = wrapped(model);
  found.parallel->check_model();
  return found;
}

bool DistributedManager::State::belongs_to_wrapped(const at::Tensor& parameter) const {
  return intercept::GradientHook::is_heard(parameter) ||  // maybe by another manager
         std::ranges::any_of(
             models, [&](const Wrapped& one) { return one.parallel->names().has(parameter); });
}

void DistributedManager::State::check_new(const torch::nn::Module* module) {
  if (module == nullptr) throw UsageError("wrap_model() got no model: construct it first");
  if (find(module) != nullptr)
    throw UsageError("this '{}' is wrapped already: call wrap_model() once for a model",
                     module->name());
  // A model that is gone but for parts of it gives them up to the one that they are in now.
  const std::vector<at::Tensor> parameters = module->parameters();
  std::erase_if(models, [&](const Wrapped& one) {
    return one.module.expired() &&
           std::ranges::any_of(parameters, [&](const at::Tensor& parameter) {
             return one.parallel->names().has(parameter);
           });
  });
  for (const auto& item : module->named_parameters())
    if (belongs_to_wrapped(item.value()))
      throw UsageError("'{}' of this '{}' belongs to a model that is wrapped already: wrap the "
                       "whole model, once",
                       item.key(), module->name());
  check_not_empty(*module);
}

// Asked here, as a model without tensors does not say on which device ranks could agree.
void DistributedManager::State::check_not_empty(const torch::nn::Module& module) const {
  const bool empty = module.parameters().empty() && module.buffers().empty();
  if (const double num_empty = RankMessages(world).sum(empty ? 1 : 0); num_empty > 0)
    throw UsageError("the module '{}' has no parameters and no buffers on {} of {} ranks: there is "
                     "nothing to train. Register them with register_parameter or register_module",
                     module.name(), num_empty, world->size());
}

// The entries of the plan that match layers of this rank's stage, and those that match none of any
// stage, which all ranks then refuse. Every rank calls it.
tensor::Plan DistributedManager::State::plan_of_stage(const torch::nn::Module& module) {
  const tensor::Plan& plan = config.tensor_plan;
  if (config.model_parallel.pipeline == 1) return plan;
  std::vector<double> has(plan.size());
  for (const auto& item : module.named_modules("", /*include_self=*/false))
    for (std::size_t i = 0; i < plan.size(); ++i)
      if (nn::matches_layer(plan[i].layers, item.key())) has[i] = 1;
  const std::vector<double> stages_that_have = RankMessages(mesh.axis("pp")).sum(has);
  tensor::Plan mine;
  for (std::size_t i = 0; i < plan.size(); ++i)
    if (has[i] > 0 || stages_that_have[i] == 0) mine.push_back(plan[i]);
  return mine;
}

// All stages throw where the plan does not fit one of them: the others would wait for its ranks.
void DistributedManager::State::cut_by_plan(torch::nn::Module& module,
                                            const tensor::internal::Defer* defer) {
  const auto& group = mesh.axis("tp");
  const tensor::Plan plan = plan_of_stage(module);
  std::string fault;
  try {
    if (!plan.empty() && defer == nullptr)
      tensor::parallelize_module(module, group, plan);
    else if (!plan.empty())
      tensor::internal::parallelize_deferred(module, group, plan, *defer);
  } catch (const UsageError& error) {
    if (config.model_parallel.pipeline == 1) throw;
    fault = error.what();
  }
  if (config.model_parallel.pipeline > 1) data_parallel::refuse_together(fault, *mesh.axis("pp"));
}

// Layers that a model's own spread() or the caller has cut already stay as they are.
void DistributedManager::State::cut_layers(torch::nn::Module& module,
                                           const tensor::internal::Defer* defer) {
  if (config.model_parallel.tensor == 1 || !nn::cut_parameters(module).empty()) return;
  const auto& group = mesh.axis("tp");
  if (!config.tensor_plan.empty()) {
    cut_by_plan(module, defer);
    return;
  }
  std::vector<NamedTensor> tensors;
  for (const auto& item : module.named_parameters()) tensors.push_back({item.key(), item.value()});
  data_parallel::check_same_tensors(tensors, *group);
  if (defer == nullptr) data_parallel::broadcast_from_first(tensors, *group);
  const auto axis = std::make_shared<nn::TensorAxis>(group, config.between_layers);
  double num_cut = 0;
  const auto cut = [&] { num_cut = nn::cut_parallel_layers(module, axis); };
  if (defer == nullptr)
    cut();
  else
    (*defer)(cut);
  if (config.model_parallel.pipeline > 1) num_cut = RankMessages(mesh.axis("pp")).sum(num_cut);
  if (num_cut == 0)
    throw UsageError("model_parallel.tensor is {}, and this '{}' has no layer that can be cut over "
                     "so many ranks: name its plain torch::nn layers in the "
                     "config's tensor_plan (docs/tensor.md); or make it of lockstep::nn's "
                     "ColumnParallelLinear, RowParallelLinear and VocabParallelEmbedding; or leave "
                     "model_parallel.tensor at 1",
                     config.model_parallel.tensor, module.name());
}

void DistributedManager::State::add(const std::shared_ptr<torch::nn::Module>& module,
                                    const shard::Origin& origin) {
  ModelParts parts(*module, group_along(mesh, axes.model),
                   origin.values ? ModelParts::Values::deferred : ModelParts::Values::there);
  auto made =
      make_parallel(*module, mesh, axes, config,
                    {.counted_pass = counted_pass, .norm_scope = parts.norm_scope()}, origin);
  models.push_back({module, std::move(parts), std::move(made)});
  // The tensors that batch norms are known by have moved.
  for (const auto& norms : batch_norms)
    if (norms->converted_any_of(*module)) norms->renew();
}

bool DistributedManager::State::is_first_of_data() const {
  return mesh.shape().position_in_group(world->rank(), axes.gradients) == 0;
}

std::vector<NamedTensor> DistributedManager::State::joined(const ModelParts& parts,
                                                           std::vector<NamedTensor> mine,
                                                           ModelParts::Names names,
                                                           const StateDictOptions& options) const {
  if (parts.alone()) return mine;
  if (!options.rank0_only)
    throw UsageError("rank0_only is off, and this job has {} ranks for each place in the data: "
                     "whole tensors come to the main rank only",
                     config.model_parallel.ranks());
  return is_first_of_data() ? parts.join(mine, names) : std::vector<NamedTensor>();
}

std::vector<NamedTensor> DistributedManager::State::own_parts(
    const ModelParts& parts, const std::vector<NamedTensor>& wanted,
    const std::vector<NamedTensor>& whole, ModelParts::Names names) const {
  if (parts.alone()) return whole;
  std::vector<std::string> faults;
  std::vector<NamedTensor> mine;
  if (is_first_of_data()) mine = parts.take(wanted, whole, names, faults);
  data_parallel::refuse_together(
      faults.empty() ? "" : fmt::format("the state does not fit this model: {}", faults.front()),
      *world);
  return mine;
}

int DistributedManager::rank() const { return world()->rank(); }

int DistributedManager::world_size() const { return world()->size(); }

int DistributedManager::local_rank() const { return state_->local_rank; }

c10::Device DistributedManager::device() const { return state_->device_manager.device(); }

const device::DeviceManager& DistributedManager::device_manager() const {
  return state_->device_manager;
}

const std::shared_ptr<comm::Communicator>& DistributedManager::world() const {
  return state_->world;
}

const DistributedConfig& DistributedManager::config() const { return state_->config; }

mesh::DeviceMesh& DistributedManager::mesh() const { return state_->mesh; }

int DistributedManager::data_rank() const {
  return state_->mesh.shape().position_in_group(rank(), state_->axes.samples);
}

int DistributedManager::data_size() const {
  return state_->mesh.shape().group_size(state_->axes.samples);
}

void DistributedManager::wrap(const ModelRef& model) {
  const auto& module = model.module();
  state_->check_new(module.get());
  if (state_->config.model_parallel.pipeline > 1)
    check_stages_differ(*module, *state_->mesh.axis("pp"));
  module->to(device());
  state_->cut_layers(*module);
  state_->add(module, {});
}

namespace {

std::string generator_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  const at::Tensor state = generator.get_state();
  return checkpoint::content_hash(
             std::span(static_cast<const std::byte*>(state.data_ptr()), state.nbytes()))
      .text();
}

// Each rank of a tensor axis computes its parts of the initial weights by itself.
void check_drawn_alike(const std::string& before, const std::string& after,
                       comm::Communicator& group) {
  const auto difference = data_parallel::first_difference({before, after}, group);
  if (!difference) return;
  throw UsageError(
      "ranks 0 and {} of '{}' {}: with a tensor axis build_model() computes each part of the "
      "initial weights where it is to be, so its ranks must draw alike. Call torch::manual_seed() "
      "with one number on all of them before, or use wrap_model()",
      difference->rank, group.name(),
      difference->place == 0 ? "had seeded differently before the model was made"
                             : "drew other numbers while they made the model");
}

}  // namespace

void DistributedManager::build(const std::function<std::shared_ptr<torch::nn::Module>()>& make,
                               const std::function<void()>& keep_stage) {
  const ModelParallelSizes& sizes = state_->config.model_parallel;
  deferred::Construction construction;
  const std::string before = sizes.tensor > 1 ? generator_state() : "";
  const auto module = construction.construct(make);
  state_->check_new(module.get());
  if (sizes.context > 1)
    throw UsageError("build_model() spreads models over the axes of data, tensor and pipeline, and "
                     "this job has {}: use wrap_model()",
                     to_text(sizes));
  keep_stage();
  if (sizes.pipeline > 1) {
    state_->check_not_empty(*module);
    check_stages_differ(*module, *state_->mesh.axis("pp"));
  }
  if (sizes.tensor > 1) {
    check_drawn_alike(before, generator_state(), *state_->mesh.axis("tp"));
    const tensor::internal::Defer defer = [&](const std::function<void()>& body) {
      construction.construct([&] {
        body();
        return 0;
      });
    };
    state_->cut_layers(*module, &defer);
  }
  construction.keep(module->buffers());
  shard::Origin origin;
  if (takes_units(state_->config)) {
    for (at::Tensor& buffer : module->buffers()) buffer.set_data(buffer.to(device()));
    origin.values = [&](std::span<const at::Tensor> parameters) {
      return std::make_shared<deferred::Materialised>(construction.materialise(parameters));
    };
    origin.device = device();
  } else {
    // Only this rank's part of a parameter that is cut has values.
    for (const at::Tensor& parameter : module->parameters())
      construction.keep(std::vector{tensor::local_part(parameter)});
    module->to(device());
  }
  state_->add(module, origin);
  // Tensors that the model did not register.
  construction.keep_all();
}

ScriptModule DistributedManager::wrap_model(const torch::jit::Module& script) {
  ScriptModule model(script);
  if (model->parameters().empty())
    throw UsageError("the TorchScript model '{}' has no parameters: torch.jit.freeze() and "
                     "optimize_for_inference() make constants of them; export it without these",
                     model->name());
  return wrap_model(model);
}

bool DistributedManager::is_wrapped(const ModelRef& model) const {
  return state_->find(model.module().get()) != nullptr;
}

int DistributedManager::convert_sync_batchnorm(const ModelRef& model) {
  const auto& module = model.module();
  if (module == nullptr)
    throw UsageError("convert_sync_batchnorm() got no model: construct it first");
  for (const auto& item : module->named_parameters())
    if (state_->belongs_to_wrapped(item.value()))
      throw UsageError("'{}' of this '{}' belongs to a model that is wrapped already: call "
                       "convert_sync_batchnorm() before wrap_model()",
                       item.key(), module->name());
  for (const auto& item : module->named_modules())
    if (const auto* const script = dynamic_cast<const ScriptModuleImpl*>(item.value().get()))
      for (const auto& buffer : script->named_buffers())
        if (buffer.key().ends_with("running_mean"))
          throw UsageError("'{}' of the TorchScript model '{}' is a batch norm's, and TorchScript "
                           "does not say how that is called: batch norms that take their "
                           "statistics over all ranks are those of modules in C++",
                           buffer.key(), script->name());
  // Tagged where they will stay: moving them later would take the tag away.
  module->to(device());
  // Ranks that have the same samples count them once.
  auto norms = std::make_unique<replicate::SyncBatchNorm>(
      *module, *group_along(state_->mesh, state_->axes.gradients));
  const int num_converted = norms->num_converted();
  if (num_converted > 0) state_->batch_norms.push_back(std::move(norms));
  return num_converted;
}

bool DistributedManager::synchronises_batch_norms(const ModelRef& model) const {
  return model.module() != nullptr && std::ranges::any_of(state_->batch_norms, [&](const auto& n) {
           return n->converted_any_of(*model.module());
         });
}

data_parallel::Accumulation DistributedManager::accumulate(const ModelRef& model) {
  return state_->checked(model).parallel->accumulate();
}

data_parallel::NoSync DistributedManager::no_sync(const ModelRef& model) {
  return state_->checked(model).parallel->no_sync();
}

void DistributedManager::backward(const ModelRef& model, const at::Tensor& loss_sum,
                                  std::int64_t count) {
  state_->wrapped(model).parallel->backward(loss_sum, count);
}

void DistributedManager::backward_passes(const ModelRef& model,
                                         const std::function<data_parallel::CountedSum()>& passes) {
  state_->wrapped(model).parallel->backward_passes(passes);
}

const data_parallel::StepTotals& DistributedManager::totals(const ModelRef& model) {
  return state_->wrapped(model).parallel->totals();
}

bool DistributedManager::every_rank_computes(const ModelRef& model) {
  return state_->wrapped(model).parallel->every_rank_computes();
}

std::unique_ptr<optim::Optimizer> DistributedManager::make_optimizer(
    const ModelRef& model, const optim::OptimizerOptions& options, double weight_decay,
    optim::DecayRule rule) {
  auto& parallel = *state_->checked(model).parallel;
  return parallel.make_optimizer(
      options,
      optim::decay_groups(data_parallel::trained_parameters(*model.module()), weight_decay, rule));
}

std::unique_ptr<optim::Optimizer> DistributedManager::make_optimizer(
    const ModelRef& model, const optim::OptimizerOptions& options,
    std::vector<optim::ParameterGroup> groups) {
  return state_->checked(model).parallel->make_optimizer(options, std::move(groups));
}

optim::ClipResult DistributedManager::clip_gradients(const ModelRef& model, double max_norm) {
  return state_->checked(model).parallel->clip_gradients(max_norm);
}

at::Tensor DistributedManager::gradient_norm(const ModelRef& model) {
  return state_->checked(model).parallel->gradient_norm();
}

bool DistributedManager::unscale_gradients(const ModelRef& model, optim::GradScaler& scaler) {
  const auto& [module, parts, parallel] = state_->checked(model);
  at::Tensor overflow = parallel->unscale_gradients(scaler);
  parts.take_largest(overflow);
  return scaler.update(overflow);
}

at::Tensor DistributedManager::full_gradient(const ModelRef& model, const std::string& name) {
  return state_->wrapped(model).parallel->full_gradient(name);
}

std::vector<NamedTensor> DistributedManager::full_state_dict(const ModelRef& model,
                                                             const StateDictOptions& options) {
  const auto& [module, parts, parallel] = state_->checked(model);
  return state_->joined(parts, parallel->full_state_dict(options), ModelParts::Names::of_tensors,
                        options);
}

void DistributedManager::load_full_state_dict(const ModelRef& model,
                                              const std::vector<NamedTensor>& state) {
  const auto& [module, parts, parallel] = state_->checked(model);
  parallel->load_full_state_dict(
      state_->own_parts(parts, parallel->names().all(), state, ModelParts::Names::of_tensors));
}

std::vector<NamedTensor> DistributedManager::full_optimizer_state(const ModelRef& model,
                                                                  const optim::Optimizer& optimizer,
                                                                  const StateDictOptions& options) {
  const auto& [module, parts, parallel] = state_->checked(model);
  return state_->joined(parts, parallel->full_optimizer_state(optimizer, options),
                        ModelParts::Names::of_state, options);
}

void DistributedManager::load_full_optimizer_state(const ModelRef& model,
                                                   optim::Optimizer& optimizer,
                                                   const std::vector<NamedTensor>& state) {
  const auto& [module, parts, parallel] = state_->checked(model);
  if (parts.alone()) return parallel->load_full_optimizer_state(optimizer, state);
  // The state has to have these shapes: whole, but for tensors that a tensor axis cuts.
  const auto wanted = parallel->full_optimizer_state(optimizer, {});
  parallel->load_full_optimizer_state(
      optimizer, state_->own_parts(parts, wanted, state, ModelParts::Names::of_state));
}

std::vector<mesh::HeldTensor> DistributedManager::held_state(const ModelRef& model) {
  const auto& [module, parts, parallel] = state_->checked(model);
  return parts.placed(parallel->held_state(), ModelParts::Names::of_tensors);
}

void DistributedManager::held_state_written(const ModelRef& model) {
  state_->checked(model).parallel->held_state_written();
}

std::vector<mesh::HeldTensor> DistributedManager::held_optimizer_state(
    const ModelRef& model, const optim::Optimizer& optimizer) {
  const auto& [module, parts, parallel] = state_->checked(model);
  return parts.placed(parallel->held_optimizer_state(optimizer), ModelParts::Names::of_state);
}

std::shared_ptr<void> DistributedManager::full_parameters(const ModelRef& model) {
  return state_->checked(model).parallel->full_parameters();
}

std::string DistributedManager::describe(const ModelRef& model) {
  return state_->checked(model).parallel->describe();
}

MemoryReport DistributedManager::memory_report(const ModelRef& model) {
  return state_->checked(model).parallel->memory_report();
}

std::vector<double> DistributedManager::sum(std::vector<double> values) const {
  return RankMessages(world()).sum(std::move(values));
}

std::vector<double> DistributedManager::sum_over_data(std::vector<double> values) const {
  return RankMessages(group_along(state_->mesh, state_->axes.gradients)).sum(std::move(values));
}

std::string DistributedManager::broadcast(const std::string& text) const {
  return RankMessages(world()).broadcast(text);
}

void DistributedManager::barrier() const { world()->barrier().wait(); }

}  // namespace lockstep
