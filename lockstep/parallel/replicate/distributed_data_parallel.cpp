#include <lockstep/parallel/replicate/distributed_data_parallel.h>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/data_parallel/agreement.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>

namespace lockstep::replicate {

DistributedDataParallel::DistributedDataParallel(torch::nn::Module& module,
                                                 std::shared_ptr<comm::Communicator> group,
                                                 Options options, CountedPass counted_pass,
                                                 std::function<void()> take_back) {
  GradientReducer::Tensors tensors{
      .trained = {},
      .frozen = {},
      .buffers = data_parallel::distinct_tensors(module.named_buffers()),
      .take_back = std::move(take_back)};
  std::vector<NamedTensor> all = data_parallel::distinct_tensors(module.named_parameters());
  for (const NamedTensor& parameter : all)
    (parameter.tensor.requires_grad() ? tensors.trained : tensors.frozen).push_back(parameter);
  all.insert(all.end(), tensors.buffers.begin(), tensors.buffers.end());
  data_parallel::check_same_tensors(all, *group);
  if (tensors.trained.empty())
    throw UsageError("the module '{}' has {} parameters and none of them requires a gradient: "
                     "there is nothing to train. Register them with register_parameter or "
                     "register_module",
                     module.name(), module.parameters().size());
  data_parallel::broadcast_from_first(all, *group);
  reducer_ = GradientReducer::make(data_parallel::RegisteredParameters(module), std::move(tensors),
                                   std::move(group), std::move(options), std::move(counted_pass));
}

void DistributedDataParallel::backward(const at::Tensor& loss_sum, std::int64_t count) {
  data_parallel::check_counted_loss(loss_sum, count);
  reducer_->backward(loss_sum, count);
}

}  // namespace lockstep::replicate
