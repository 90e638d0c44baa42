#include <lockstep/parallel/replicate/distributed_data_parallel.h>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/replicate/agreement.h>
#include <lockstep/parallel/replicate/distinct_tensors.h>

namespace lockstep::replicate {

DistributedDataParallel::DistributedDataParallel(torch::nn::Module& module,
                                                 std::shared_ptr<comm::Communicator> group,
                                                 Options options, CountedPass counted_pass) {
  GradientReducer::Tensors tensors{
      .trained = {}, .frozen = {}, .buffers = distinct_tensors(module.named_buffers())};
  std::vector<NamedTensor> all = distinct_tensors(module.named_parameters());
  for (const NamedTensor& parameter : all)
    (parameter.tensor.requires_grad() ? tensors.trained : tensors.frozen).push_back(parameter);
  all.insert(all.end(), tensors.buffers.begin(), tensors.buffers.end());
  check_same_tensors(all, *group, all.empty() ? at::kCPU : all.front().tensor.device());
  if (tensors.trained.empty())
    throw UsageError("the module '{}' has {} parameters and none of them requires a gradient: "
                     "there is nothing to train. Register them with register_parameter or "
                     "register_module",
                     module.name(), module.parameters().size());
  broadcast_from_first(all, *group);
  reducer_ = GradientReducer::make(std::move(tensors), std::move(group), std::move(options),
                                   std::move(counted_pass));
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
  reducer_->backward(loss_sum, count);
}

}  // namespace lockstep::replicate
