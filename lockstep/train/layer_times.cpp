#include <lockstep/train/layer_times.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/device/autocast.h>

namespace lockstep::train {

namespace {

double seconds_once_done(c10::Device device) {
  if (!device.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.synchronizeStream(guard.getStream(device));
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

std::vector<double> seconds_of_layers(models::LanguageModel& model, std::int64_t micro_batch,
                                      std::int64_t sequence_length,
                                      std::optional<c10::ScalarType> autocast) {
  const std::int64_t num_layers = model.config().num_layers;
  const c10::Device device = model.parameters().front().device();
  const at::Tensor tokens =
      at::zeros({micro_batch, sequence_length}, at::dtype(at::kLong).device(device));
  std::vector<std::int64_t> rows(static_cast<std::size_t>(micro_batch), 0);
  const auto run = [&](std::int64_t layer) {
    at::Tensor x;  // [micro_batch, positions, hidden]
    model.set_random_position(0, rows);
    std::optional<device::Autocast> cast;
    if (autocast) cast.emplace(device.type(), *autocast);
    if (layer > 0) {
      const at::NoGradGuard no_grad;
      x = model.run_layers({0, 1}, tokens, {});
    }
    if (x.defined()) x.requires_grad_();
    const double start = seconds_once_done(device);
    at::Tensor made = model.run_layers({layer, layer + 1}, tokens, x);
    if (layer + 1 == num_layers) made = model.loss_of(made, tokens).sum;
    cast.reset();
    made.sum().backward();
    const double taken = seconds_once_done(device) - start;
    for (at::Tensor& parameter : model.parameters()) parameter.mutable_grad() = at::Tensor();
    return taken;
  };
  // The least of a few measurements, because disturbances only make them longer.
  const auto least = [&](std::int64_t layer) {
    double seconds = std::numeric_limits<double>::infinity();
    for (int time = 0; time < 3; ++time) seconds = std::min(seconds, run(layer));
    return seconds;
  };
  std::vector<double> seconds;
  seconds.push_back(least(0));
  if (num_layers > 2) seconds.resize(static_cast<std::size_t>(num_layers) - 1, least(1));
  if (num_layers > 1) seconds.push_back(least(num_layers - 1));
  return seconds;
}

}  // namespace lockstep::train
