#include <lockstep/parallel/data_parallel/parallel_model.h>

#include <utility>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/checked_optimizer.h>

namespace lockstep::data_parallel {

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
    throw UsageError("{} looks at whole parameters, and the layers of this model are cut over a "
                     "tensor axis: use an optimizer that goes by elements, such as AdamW, or a "
                     "tensor axis of 1",
                     optim::name_of(options));
  return optim::checked(
      do_make_optimizer(options, names_.renamed(std::move(groups))),
      {.before_use =
           [weak = std::weak_ptr<void>(alive_)] {
             if (weak.expired())
               throw UsageError(
                   "the model of this optimizer is gone, or the manager that spread it over the "
                   "ranks: keep both, the latter as setup_distributed() returned it, for as long "
                   "as the optimizer is used");
           },
       .before_step =
           [this, last = gradients().num_exchanges()]() mutable {
             const GradientExchange& exchange = gradients();
             exchange.run_check([this] { check_step(); });
             if (std::exchange(last, exchange.num_exchanges()) == exchange.num_exchanges())
               check_own_gradients();
           },
       .after_zero_grad = [this] { gradients().follow_dropped(); }});
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
