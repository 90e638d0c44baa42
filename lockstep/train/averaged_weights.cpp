#include <lockstep/train/averaged_weights.h>

#include <set>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

namespace lockstep::train {

namespace {

// 16 bits do not hold the small moves of an average.
at::ScalarType precision_of_average(at::ScalarType weight) {
  return weight == at::kHalf || weight == at::kBFloat16 ? at::kFloat : weight;
}

}  // namespace

AveragedWeights::AveragedWeights(DistributedManager dist, std::shared_ptr<torch::nn::Module> model,
                                 double decay)
    : dist_(std::move(dist)), model_(std::move(model)), decay_(decay) {
  begin();
}

void AveragedWeights::update(const at::Tensor& factor) {
  const c10::NoGradGuard no_grad;
  const at::Tensor share = factor.ne(0).to(at::kDouble).mul(1 - decay_);
  const std::vector<mesh::HeldTensor> now = weights();
  for (std::size_t i = 0; i < now.size(); ++i)
    averages_[i].lerp_(now[i].values.to(averages_[i].scalar_type()),
                       share.to(averages_[i].options()));
}

void AveragedWeights::begin() {
  const c10::NoGradGuard no_grad;
  averages_.clear();
  for (const mesh::HeldTensor& one : weights())
    averages_.push_back(one.values.to(precision_of_average(one.values.scalar_type()),
                                      /*non_blocking=*/false, /*copy=*/true));
}

std::vector<mesh::HeldTensor> AveragedWeights::held() const {
  std::vector<mesh::HeldTensor> all = weights();
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].name = "average/" + all[i].name;
    all[i].values = averages_[i];
  }
  return all;
}

void AveragedWeights::in_place_of_weights(const std::function<void()>& work) {
  std::vector<at::Tensor> trained;
  for (const mesh::HeldTensor& one : weights()) trained.push_back(one.values.clone());
  set_weights(averages_);
  try {
    work();
  } catch (...) {
    set_weights(trained);
    throw;
  }
  set_weights(trained);
}

std::vector<mesh::HeldTensor> AveragedWeights::weights() const {
  std::set<std::string> buffers;
  for (const auto& item : model_->named_buffers()) buffers.insert(item.key());
  std::vector<mesh::HeldTensor> all = dist_.held_state(model_);
  std::erase_if(all, [&](const mesh::HeldTensor& one) {
    return buffers.contains(one.name) || !one.values.is_floating_point();
  });
  return all;
}

void AveragedWeights::set_weights(const std::vector<at::Tensor>& values) {
  const c10::NoGradGuard no_grad;
  const std::vector<mesh::HeldTensor> now = weights();
  for (std::size_t i = 0; i < now.size(); ++i) now[i].values.copy_(values[i]);
  dist_.held_state_written(model_);
}

}  // namespace lockstep::train
