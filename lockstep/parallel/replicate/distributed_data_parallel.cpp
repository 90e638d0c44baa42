#include <lockstep/parallel/replicate/distributed_data_parallel.h>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/replicate/agreement.h>
#include <lockstep/parallel/replicate/distinct_tensors.h>

namespace lockstep::replicate {

DistributedDataParallel::DistributedDataParallel(torch::nn::Module& module,
                                                 std::shared_ptr<comm::Communicator> group,
                                                 Options options)
    : device_(at::kCPU) {
  std::vector<NamedTensor> all = distinct_tensors(module.named_parameters());
  std::vector<NamedTensor> buffers = distinct_tensors(module.named_buffers());
  std::vector<NamedTensor> trained = trained_parameters(module);
  all.insert(all.end(), buffers.begin(), buffers.end());
  if (!all.empty()) device_ = all.front().tensor.device();
  check_same_tensors(all, *group, device_);
  if (trained.empty())
    throw UsageError("the module '{}' has {} parameters and none of them requires a gradient: "
                     "there is nothing to train. Register them with register_parameter or "
                     "register_module",
                     module.name(), module.parameters().size());
  broadcast_from_first(all, *group);
  reducer_ = GradientReducer::make(std::move(trained), std::move(buffers), std::move(group),
                                   std::move(options));
}

void DistributedDataParallel::backward(const at::Tensor& loss_sum, std::int64_t count) {
  if (count < 0 || (count > 0 && !loss_sum.defined()))
    throw UsageError("backward() of a loss over {} samples{}: give the loss's sum and how many "
                     "samples it is over",
                     count, loss_sum.defined() ? "" : " without a loss");
  if (loss_sum.defined() && loss_sum.numel() != 1)
    throw UsageError("backward() of a loss of shape [{}]: it must be one number, the sum over the "
                     "samples",
                     fmt::join(loss_sum.sizes().begin(), loss_sum.sizes().end(), ", "));
  reducer_->add_loss(loss_sum.defined() ? loss_sum.reshape({}) : at::zeros({}, device_), count);
  const std::int64_t before = reducer_->num_exchanges();
  if (loss_sum.defined() && loss_sum.requires_grad()) loss_sum.backward();
  // A pass that met no parameter has told nobody that it is over.
  if (reducer_->exchange() && reducer_->num_exchanges() == before) reducer_->exchange_now();
}

}  // namespace lockstep::replicate
