#include <lockstep/train/loss_scaling.h>

#include <cmath>

#include <ATen/ATen.h>

namespace lockstep::train {

namespace {

constexpr const char* kSamples = "loss_scale.samples";

}  // namespace

void LossScaling::begin_step(const DistributedManager& dist, double count) {
  if (knows_step_) return;
  const double mean = dist.mean(count);
  if (mean <= 0) return;
  scaler_.set_samples_per_sum(std::exp2(std::round(std::log2(std::max(mean, 1.0)))));
  knows_step_ = true;
}

std::map<std::string, double> LossScaling::values() const {
  std::map<std::string, double> values;
  for (const auto& [name, number] : scaler_.state()) values[name] = number.item<double>();
  if (knows_step_) values[kSamples] = scaler_.samples_per_sum();
  return values;
}

void LossScaling::load(const std::map<std::string, double>& values) {
  std::vector<NamedTensor> state = scaler_.state();
  for (auto& [name, number] : state) {
    const auto found = values.find(name);
    if (found == values.end()) return;
    number = at::scalar_tensor(found->second, number.options());
  }
  scaler_.load_state(state);
  if (const auto found = values.find(kSamples); found != values.end()) {
    scaler_.set_samples_per_sum(found->second);
    knows_step_ = true;
  }
}

}  // namespace lockstep::train
