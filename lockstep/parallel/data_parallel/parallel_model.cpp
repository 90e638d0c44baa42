#include <lockstep/parallel/data_parallel/parallel_model.h>

#include <utility>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>

namespace lockstep::data_parallel {

// The optimizer of a strategy. It asks the model before it does anything, tells it what was done to
// gradients, and counts its state for as long as it is there.
class ParallelModel::ModelOptimizer final : public optim::Optimizer {
 public:
  ModelOptimizer(std::unique_ptr<optim::Optimizer> optimizer, ParallelModel& model)
      : optimizer_(std::move(optimizer)),
        model_(model),
        alive_(model.optimizer_bytes_),
        last_exchange_(model.gradients().num_exchanges()),
        bytes_(optimizer_->state_bytes()) {
    *model.optimizer_bytes_ += bytes_;
  }
  ~ModelOptimizer() override {
    if (const auto total = alive_.lock()) *total -= bytes_;
  }

  void step(double learning_rate, const optim::StepFactor& factor) override {
    check_alive();
    const GradientExchange& exchange = model_.gradients();
    exchange.run_check([this] { model_.check_step(); });
    if (std::exchange(last_exchange_, exchange.num_exchanges()) == exchange.num_exchanges())
      model_.check_own_gradients();
    optimizer_->step(learning_rate, factor);
  }
  void zero_grad() override {
    check_alive();
    optimizer_->zero_grad();
    model_.gradients().follow_dropped();
  }
  std::vector<NamedTensor> state() const override {
    check_alive();
    return optimizer_->state();
  }
  std::int64_t state_bytes() const override { return bytes_; }
  void load_state(const std::vector<NamedTensor>& state) override {
    check_alive();
    optimizer_->load_state(state);
  }

 private:
  void check_alive() const {
    if (alive_.expired())
      throw UsageError(
          "the model of this optimizer is gone, or the manager that spread it over the ranks: keep "
          "both, the latter as setup_distributed() returned it, for as long as the optimizer is "
          "used");
  }

  std::unique_ptr<optim::Optimizer> optimizer_;
  ParallelModel& model_;  // while alive_ is not expired
  std::weak_ptr<std::int64_t> alive_;
  std::int64_t last_exchange_;
  std::int64_t bytes_;
};

ParallelModel::ParallelModel(const torch::nn::Module& module,
                             std::shared_ptr<comm::Communicator> group, ModelContext context)
    : names_(module), group_(std::move(group)), context_(std::move(context)) {}

void ParallelModel::backward(const at::Tensor& loss_sum, std::int64_t count) {
  check_counted_loss(loss_sum, count);
  if (!loss_sum.defined() && every_rank_computes())
    throw UsageError("backward() without a loss on a rank without samples: with sharded parameters "
                     "the other ranks' gathers need this one, too. Run the model on any sample and "
                     "pass its loss times 0 and a count of 0, or use SHARD_GRAD_OP");
  gradients().backward(loss_sum, count);
}

std::unique_ptr<optim::Optimizer> ParallelModel::make_optimizer(
    const optim::OptimizerOptions& options, std::vector<optim::ParameterGroup> groups) {
  if (context_.norm_scope.cuts_parameters && options.kind() != optim::StepKind::elementwise)
    throw UsageError("{} looks at whole parameters or blocks of them, and the layers of this model "
                     "are cut over a "
                     "tensor axis: use an optimizer that goes by elements, such as AdamW, or a "
                     "tensor axis of 1",
                     optim::name_of(options));
  return std::make_unique<ModelOptimizer>(
      do_make_optimizer(options, names_.renamed(std::move(groups))), *this);
}

optim::ClipResult ParallelModel::clip_gradients(double max_norm) {
  optim::check_max_norm(max_norm);
  const double norm = gradient_norm().item<double>();
  std::vector<at::Tensor> gradients;
  for (const auto& [name, tensor] : stepped_on())
    if (tensor.grad().defined()) gradients.push_back(tensor.grad());
  return optim::clip_to(norm, gradients, max_norm);
}

at::Tensor ParallelModel::unscale_gradients(optim::GradScaler& scaler) {
  // Where the group's backend takes it: gradients may be offloaded.
  at::Tensor overflow = scaler.unscale(stepped_on()).to(device());
  group_->all_reduce(overflow, comm::ReduceOp::max).wait();
  return overflow;
}

at::Tensor ParallelModel::full_gradient(const std::string& name) {
  return do_full_gradient(names_.first_name(name));
}

std::vector<NamedTensor> ParallelModel::full_state_dict(const StateDictOptions& options) {
  return names_.with_every_name(do_full_state_dict(options));
}

void ParallelModel::load_full_state_dict(const std::vector<NamedTensor>& state) {
  do_load_full_state_dict(names_.with_first_names(state));
}

}  // namespace lockstep::data_parallel
