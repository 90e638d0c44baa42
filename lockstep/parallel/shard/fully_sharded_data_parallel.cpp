#include <lockstep/parallel/shard/fully_sharded_data_parallel.h>

#include <algorithm>
#include <map>
#include <string>
#include <unordered_set>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/fmt.h>

#include <lockstep/base/error.h>
#include <lockstep/device/autocast.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/parallel/data_parallel/agreement.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>
#include <lockstep/parallel/data_parallel/save_guard.h>
#include <lockstep/parallel/shard/flat_unit.h>
#include <lockstep/parallel/shard/gradient_norm.h>
#include <lockstep/parallel/shard/optimizer_state.h>
#include <lockstep/parallel/shard/sharded_optimizer.h>
#include <lockstep/parallel/shard/sizes/strategy.h>
#include <lockstep/parallel/shard/sizes/unit_sizes.h>
#include <lockstep/parallel/shard/wrapping_checks.h>

namespace lockstep::shard {

// A model that was written for Float hands Float to its first layer, whose weights are now of 16
// bits. Such an operator runs under LibTorch's autocast, which casts its inputs where that is safe,
// and in a way that backward follows; all others run as they are.
//
// Threading: as LibTorch's operators.
class LowPrecisionOperators final : public intercept::Owner {
 public:
  explicit LowPrecisionOperators(c10::ScalarType type) : type_(type) {}

  void on_call(intercept::Call& call, std::span<const intercept::Use> uses) override;
  bool only_listens() const override { return true; }

 private:
  c10::ScalarType type_;
};

namespace {

bool is_float(const c10::IValue& value) {
  if (value.isTensor())
    return value.toTensor().defined() && value.toTensor().scalar_type() == at::kFloat;
  if (value.isTensorList())
    return std::ranges::any_of(value.toTensorVector(), [](const at::Tensor& tensor) {
      return tensor.defined() && tensor.scalar_type() == at::kFloat;
    });
  return false;
}

// Autocast knows these on GPUs alone.
bool autocast_lacks(const std::string& op) {
  static const std::unordered_set<std::string> names = {"aten::layer_norm", "aten::group_norm",
                                                        "aten::lstm",       "aten::gru",
                                                        "aten::rnn_tanh",   "aten::rnn_relu"};
  return names.contains(op);
}

c10::IValue cast(const c10::IValue& value, c10::ScalarType type) {
  if (value.isTensor()) return value.toTensor().to(type);
  std::vector<at::Tensor> tensors = value.toTensorVector();
  for (at::Tensor& tensor : tensors)
    if (tensor.defined() && tensor.scalar_type() == at::kFloat) tensor = tensor.to(type);
  return tensors;
}

void cast_inputs(intercept::Call& call, c10::ScalarType type) {
  torch::jit::Stack& stack = call.stack();
  for (std::size_t i = stack.size() - call.arguments().size(); i < stack.size(); ++i)
    if (is_float(stack[i])) stack[i] = cast(stack[i], type);
}

}  // namespace

void LowPrecisionOperators::on_call(intercept::Call& call, std::span<const intercept::Use> uses) {
  if (std::ranges::none_of(call.arguments(), is_float)) return call.proceed();
  const c10::Device device = uses.front().tensor.device();
  if (device.is_cpu() && autocast_lacks(call.op().operator_name().name)) cast_inputs(call, type_);
  const device::Autocast autocast(device.type(), type_, device::CastCache::unused);
  call.proceed();
}

namespace {

std::int64_t largest_bytes(const std::vector<PlannedUnit>& plans) {
  std::int64_t largest = 0;
  for (const PlannedUnit& plan : plans)
    largest = std::max(
        largest, plan.num_elements() *
                     static_cast<std::int64_t>(plan.parameters.front().tensor.element_size()));
  return largest;
}

std::int64_t bytes_of(const std::vector<NamedTensor>& tensors) {
  std::int64_t total = 0;
  for (const NamedTensor& tensor : tensors)
    total += static_cast<std::int64_t>(tensor.tensor.nbytes());
  return total;
}

void convert_buffers(const torch::nn::Module& module, std::optional<at::ScalarType> type) {
  if (!type) return;
  for (const auto& part : module.modules()) {
    if (is_batch_norm(*part)) continue;
    for (const at::Tensor& buffer : part->buffers(/*recurse=*/false))
      if (buffer.scalar_type() == at::kFloat) buffer.set_data(buffer.to(*type));
  }
}

void check_trained(const torch::nn::Module& module, const std::vector<NamedTensor>& parameters) {
  if (std::ranges::none_of(parameters, [](const auto& p) { return p.tensor.requires_grad(); }))
    throw UsageError("the module '{}' has {} parameters and none of them requires a gradient: "
                     "there is nothing to train. Register them with register_parameter or "
                     "register_module",
                     module.name(), parameters.size());
}

}  // namespace

FullyShardedDataParallel::FullyShardedDataParallel(torch::nn::Module& module, Groups groups,
                                                   Options options,
                                                   data_parallel::ModelContext context,
                                                   const Origin& origin)
    : ParallelModel(module, groups.all, std::move(context)),
      groups_(std::move(groups)),
      options_(std::move(options)),
      module_name_(module.name()),
      buffers_(data_parallel::distinct_tensors(module.named_buffers())) {
  if (options_.max_live_units == 0)
    throw UsageError("max_live_units is 0: at least the unit that is used has to be there, and 2 "
                     "let the next one come meanwhile");
  check(options_.mixed_precision);
  check(options_.cpu_offload);
  if (options_.zero_plus_plus.quantize_weights && options_.cut == Cut::gradients)
    throw UsageError("ZeRO++ is to quantize weights when they are gathered, and with this strategy "
                     "they stay on every rank: use {}",
                     strategies_that_cut(ShardedState::parameters));
  if (options_.zero_plus_plus.has_nodes() && options_.cut == Cut::gradients &&
      !options_.zero_plus_plus.quantize_gradients)
    throw UsageError("ZeRO++ is to keep a copy of the model in each node, and with this strategy "
                     "every rank has one: use {}",
                     strategies_that_cut(ShardedState::parameters));
  if (options_.cpu_offload.offload_params && options_.cut == Cut::gradients)
    throw UsageError("parameters are to be offloaded to the host's memory, and with this strategy "
                     "they stay on every rank's device: use {}",
                     strategies_that_cut(ShardedState::parameters));
  intercept::claim_key();
  std::vector<NamedTensor> all =
      data_parallel::distinct_tensors(data_parallel::held_parameters(module));
  const std::vector<NamedTensor> parameters = all;
  // A tensor that is both a parameter and a buffer moves as a parameter does.
  std::erase_if(buffers_, [&](const NamedTensor& buffer) {
    return std::ranges::any_of(
        parameters, [&](const NamedTensor& one) { return one.tensor.is_same(buffer.tensor); });
  });
  all.insert(all.end(), buffers_.begin(), buffers_.end());
  const c10::Device device =
      origin.device.value_or(all.empty() ? at::kCPU : all.front().tensor.device());
  data_parallel::check_same_tensors(all, *groups_.all);
  check_trained(module, parameters);
  check_quantizes(options_.zero_plus_plus, parameters);
  refuse_sharded(module);
  data_parallel::refuse_together(shared_memory_fault(parameters), *groups_.all);

  const bool in_16_bits = computes_in_param_dtype(options_.mixed_precision, device);
  nodes_ = make_nodes(options_.zero_plus_plus, *groups_.gather, *groups_.reduce);
  std::vector<PlannedUnit> plans = plan_units(
      module, options_.units,
      options_.mixed_precision.param_dtype ? parameters_of_batch_norms(module) : KeepType());
  gathered_memory_ = std::make_shared<BufferPool>(
      [device](std::int64_t bytes) {
        return at::empty({bytes}, at::dtype(at::kByte).device(device));
      },
      static_cast<std::int64_t>(options_.max_live_units) * largest_bytes(plans));
  std::vector<std::int64_t> sizes;
  for (const PlannedUnit& plan : plans) sizes.push_back(plan.num_elements());
  const int num_parts = groups_.gather->size();
  const std::vector<bool> resident = options_.cpu_offload.offload_params
                                         ? small_units(sizes, num_parts)
                                         : choose_residents(sizes, num_parts);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    const bool gathered = options_.cut == Cut::gradients || resident[i];
    const at::Tensor& first = plans[i].parameters.front().tensor;
    UnitFormat format = UnitFormat::of(
        first.scalar_type(), origin.device.value_or(first.device()),
        plans[i].keeps_type ? MixedPrecision() : options_.mixed_precision, options_.cpu_offload);
    format.quantized = options_.zero_plus_plus.quantize_weights && !gathered;
    auto unit = std::make_unique<FlatUnit>(std::move(plans[i]), groups_.gather,
                                           gathered ? nullptr : gathered_memory_, format,
                                           gathered ? nullptr : nodes_.gather);
    unit->adopt(*groups_.all, origin);
    unit->give_memory_back(options_.scrub_freed_memory);
    units_.push_back(std::move(unit));
  }
  for (std::size_t unit = 0; unit < units_.size(); ++unit)
    for (std::size_t member = 0; member < units_[unit]->parameters().size(); ++member)
      places_[units_[unit]->parameters()[member].name] = {unit, member};
  for (const NamedTensor& parameter : data_parallel::trained_parameters(module))
    in_model_order_.push_back(places_.at(parameter.name));
  if (in_16_bits) convert_buffers(module, options_.mixed_precision.buffer_dtype);
  if (!buffers_.empty()) data_parallel::broadcast_from_first(buffers_, *groups_.all);
  gathered_memory_->reset_peaks();

  gatherer_ = std::make_shared<ParameterGatherer>(
      units_, ParameterGatherer::Limits{.max_live_units = options_.max_live_units,
                                        .scrub_freed_memory = options_.scrub_freed_memory});
  for (const auto& unit : units_) {
    if (unit->format().computes_in_other_type()) {
      if (low_precision_ == nullptr)
        low_precision_ = std::make_shared<LowPrecisionOperators>(unit->format().gathered);
      intercept::add_owner(unit->flat().storage(), low_precision_);
    }
    if (unit->has_owner())
      intercept::add_owner(unit->flat().storage(), gatherer_,
                           fmt::format("the module '{}' was sharded by a manager that is gone, and "
                                       "its parameters '{}' with it: keep what setup_distributed() "
                                       "returned for as long as the model",
                                       module_name_, unit->name()));
  }
  sharder_ = GradientSharder::make(
      data_parallel::RegisteredParameters(module),
      {.units = units_,
       .gatherer = gatherer_.get(),
       .buffers = options_.broadcast_buffers ? buffers_ : std::vector<NamedTensor>(),
       .quantize_gradients = options_.zero_plus_plus.quantize_gradients,
       .nodes = nodes_.reduce},
      groups_, this->context().counted_pass);
  const std::string cut = fmt::format("cut among {} rank{}", num_parts, num_parts == 1 ? "" : "s");
  data_parallel::guard_saving(
      module, std::make_shared<data_parallel::SaveGuard>(
                  kSaveGuard,
                  fmt::format("torch::save() and torch::load() find nothing of a sharded model's "
                              "weights, which are {}: write what full_state_dict() returns on the "
                              "first rank, and load into the model before wrap_model(), or with "
                              "load_full_state_dict()",
                              cut),
                  cut));
}

FullyShardedDataParallel::~FullyShardedDataParallel() {
  // The next step's first unit, which no rank is going to use. Not for ever: others may be gone.
  constexpr milliseconds kPatience{2'000};
  if (std::uncaught_exceptions() == 0) gatherer_->await_arrivals(Deadline::after(kPatience));
}

bool FullyShardedDataParallel::every_rank_computes() const {
  return std::ranges::any_of(
      units_, [](const auto& unit) { return unit->residence() == Residence::sharded; });
}

std::unique_ptr<optim::Optimizer> FullyShardedDataParallel::do_make_optimizer(
    const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) {
  if (options_.mixed_precision.master_dtype)
    for (optim::ParameterGroup& group : groups)
      group.sixteen_bits = options_.mixed_precision.master_rounding;
  return make_sharded_optimizer(
      {.name = module_name_,
       .units = units_,
       .group = groups_.reduce,
       .gradient = [this](std::size_t unit,
                          std::size_t member) { return sharder_->piece(unit, member); },
       .drop_gradients =
           [this](std::span<const SteppedModel::Member> members) {
             sharder_->drop_gradients(members);
           },
       .after_step = [this] { after_step(); }},
      options, std::move(groups));
}

void FullyShardedDataParallel::check_step() {
  sharder_->check_model();
  if (gatherer_->is_held())
    throw UsageError("step() while full_parameters() holds the parameters of '{}', which would "
                     "stay as they were: end that first",
                     module_name_);
}

void FullyShardedDataParallel::after_step() {
  gatherer_->release_all();
  refresh(units_);
  gatherer_->start_step();
}

at::Tensor FullyShardedDataParallel::gradient_norm() {
  sharder_->check_model();
  std::vector<GradientPiece> pieces;  // that this rank answers for
  for (const auto& [unit, member] : in_model_order_) {
    GradientPiece piece{.values = sharder_->piece(unit, member), .ranges = {}};
    if (!piece.values.defined()) continue;
    if (!context().norm_scope.counts_parameter(units_[unit]->parameters()[member].name)) continue;
    for (int rank = 0; rank < groups_.reduce->size(); ++rank)
      piece.ranges.push_back(units_[unit]->layout().piece(member, rank));
    pieces.push_back(std::move(piece));
  }
  return context().norm_scope.norm(gradient_sum_of_squares(pieces, *groups_.reduce, device()));
}

std::vector<optim::NamedParameter> FullyShardedDataParallel::stepped_on() {
  sharder_->check_model();
  std::vector<optim::NamedParameter> pieces;
  for (const auto& [unit, member] : in_model_order_) {
    at::Tensor gradient = sharder_->piece(unit, member);
    if (!gradient.defined()) continue;
    optim::NamedParameter piece{units_[unit]->parameters()[member].name,
                                units_[unit]->piece(member)};
    piece.tensor.mutable_grad() = std::move(gradient);
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

at::Tensor FullyShardedDataParallel::do_full_gradient(const std::string& name) {
  const auto [unit_index, member] = places_.at(name);
  const FlatUnit& unit = *units_[unit_index];
  const at::Tensor mine = unit.is_trained() ? sharder_->piece(unit_index, member) : at::Tensor();
  if (!mine.defined()) return {};
  return gather_pieces(mine, unit, member, *groups_.reduce);
}

std::vector<NamedTensor> FullyShardedDataParallel::do_full_state_dict(
    const StateDictOptions& options) {
  const c10::NoGradGuard no_grad;
  sharder_->check_model();
  const bool wanted = !options.rank0_only || groups_.all->rank() == 0;
  std::vector<NamedTensor> state;
  const auto keep = [&](const NamedTensor& item, const at::Tensor& values) {
    if (!wanted) return;
    const c10::Device device = options.offload_to_cpu ? c10::Device(at::kCPU) : values.device();
    state.push_back({item.name, values.detach().to(device, values.scalar_type(),
                                                   /*non_blocking=*/false, /*copy=*/true)});
  };
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    const at::Tensor whole = units_[unit]->whole();
    const FlatLayout& layout = units_[unit]->layout();
    const auto& parameters = units_[unit]->parameters();
    for (std::size_t member = 0; member < parameters.size(); ++member)
      keep(parameters[member],
           whole.narrow(0, layout.range(member).begin, layout.range(member).size())
               .view(parameters[member].tensor.sizes()));
  }
  for (const NamedTensor& buffer : buffers_) keep(buffer, buffer.tensor);
  return state;
}

void FullyShardedDataParallel::do_load_full_state_dict(const std::vector<NamedTensor>& state) {
  const c10::NoGradGuard no_grad;
  sharder_->check_model();
  const bool first = groups_.all->rank() == 0;
  std::vector<NamedTensor> wanted;
  for (const auto& unit : units_)
    wanted.insert(wanted.end(), unit->parameters().begin(), unit->parameters().end());
  wanted.insert(wanted.end(), buffers_.begin(), buffers_.end());
  const std::string fault = first ? data_parallel::state_fault(wanted, state) : "";
  data_parallel::refuse_together(
      fault.empty() ? ""
                    : fmt::format("the state is not that of '{}': {}. Pass what the same "
                                  "model's full_state_dict() returned",
                                  module_name_, fault),
      *groups_.all);
  std::map<std::string, at::Tensor> given;
  if (first) given = data_parallel::by_name(state);

  for (const auto& unit : units_) {
    // Through memory of its own: what is gathered now may be in use.
    const at::Tensor whole =
        at::empty({unit->layout().num_padded()}, unit->options(unit->format().own));
    if (first)
      for (std::size_t member = 0; member < unit->parameters().size(); ++member) {
        const mesh::Interval range = unit->layout().range(member);
        whole.narrow(0, range.begin, range.size())
            .copy_(given.at(unit->parameters()[member].name).reshape({-1}));
      }
    groups_.all->broadcast(whole, 0).wait();
    unit->replace(whole);
  }
  for (const NamedTensor& buffer : buffers_)
    if (first) buffer.tensor.copy_(given.at(buffer.name));
  if (!buffers_.empty()) data_parallel::broadcast_from_first(buffers_, *groups_.all);
  gatherer_->release_all();
}

std::vector<mesh::HeldTensor> FullyShardedDataParallel::held_state() {
  sharder_->check_model();
  std::vector<mesh::HeldTensor> held;
  for (const auto& unit : units_)
    for (std::size_t member = 0; member < unit->parameters().size(); ++member) {
      const auto& [name, parameter] = unit->parameters()[member];
      held.push_back({name, unit->piece(member), parameter.sizes().vec(), unit->placement(member)});
    }
  for (const auto& [name, buffer] : buffers_) held.push_back(mesh::whole_tensor(name, buffer));
  return held;
}

void FullyShardedDataParallel::held_state_written() {
  gatherer_->release_all();
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    units_[unit]->part_changed();
    if (units_[unit]->residence() != Residence::gathered) continue;
    naming_units(units_, [&] {
      units_[unit]->start_gather({.subject = static_cast<std::int32_t>(unit)});
      units_[unit]->finish_gather();
    });
  }
}

std::vector<NamedTensor> FullyShardedDataParallel::full_optimizer_state(
    const optim::Optimizer& optimizer, const StateDictOptions& options) {
  return gather_state(optimizer.state(), units_, *groups_.reduce, options,
                      groups_.all->rank() == 0);
}

void FullyShardedDataParallel::load_full_optimizer_state(optim::Optimizer& optimizer,
                                                         const std::vector<NamedTensor>& state) {
  scatter_state(optimizer, state, units_, *groups_.all, groups_.reduce->rank());
}

std::vector<mesh::HeldTensor> FullyShardedDataParallel::held_optimizer_state(
    const optim::Optimizer& optimizer) {
  return shard::held_state(optimizer.state(), units_);
}

std::shared_ptr<void> FullyShardedDataParallel::full_parameters() {
  using Hold = ParameterGatherer::Hold;
  Hold::Units all;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) all.push_back(unit);
  return std::shared_ptr<Hold>(new Hold(*gatherer_, std::move(all)), [](Hold* hold) {
    const std::unique_ptr<Hold> owned(hold);
    hold->keep_edits();
  });
}

std::string FullyShardedDataParallel::describe() const { return describe_units(units_); }

MemoryReport FullyShardedDataParallel::memory_report() const {
  MemoryReport report{.num_parameters = count_parameters(units_),
                      .num_ranks = groups_.gather->size()};
  for (const auto& unit : units_) {
    report.parameters += unit->device_bytes_at_rest();
    report.on_host += unit->host_bytes_at_rest();
  }
  (sharder_->sums_on_host() ? report.on_host : report.gradients) += sharder_->gradient_bytes();
  (sharder_->sums_on_host() ? report.on_host : report.optimizer) += optimizer_bytes();
  report.buffers = bytes_of(buffers_);
  const BufferPool::Usage gathered = gathered_memory_->usage();
  report.gathered_now = gathered.taken_bytes;
  report.gathered_peak = gathered.peak_held_bytes;
  report.gradients_on_their_way_peak = sharder_->buffer_usage().peak_held_bytes;
  return report;
}

}  // namespace lockstep::shard
