#include <lockstep/optim/optimizer.h>

#include <map>
#include <mutex>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>

namespace lockstep::optim {

StepFactor::StepFactor(const at::Tensor& factor) : factor_(factor) {
  if (!factor.defined() || factor.numel() != 1 || factor.scalar_type() != at::kDouble)
    throw UsageError("a step cannot multiply gradients by {}: give one Double",
                     factor.defined()
                         ? fmt::format("{} of the shape [{}]", c10::toString(factor.scalar_type()),
                                       fmt::join(factor.sizes(), ", "))
                         : "an undefined tensor");
  on_host_ = device::HostCopy(factor);
}

double StepFactor::value() const { return is_one() ? 1 : *on_host_.get().data_ptr<double>(); }

void multiply(const std::vector<at::Tensor>& gradients, double factor) {
  if (factor == 1) return;
  const c10::NoGradGuard no_grad;
  // The operator refuses an empty list, and older versions of it trip over empty tensors.
  std::vector<at::Tensor> present;
  for (const at::Tensor& gradient : gradients)
    if (gradient.numel() > 0) present.push_back(gradient);
  if (!present.empty()) at::_foreach_mul_(present, factor);
}

namespace {

struct Makers {
  std::mutex mutex;
  std::map<std::type_index, OptimizerMaker> by_options;
};

Makers& makers() {
  static Makers all = [] {
    std::map<std::type_index, OptimizerMaker> by_options;
    for_each_optimizer([&]<typename Options>(const std::vector<std::string>&, const Options&) {
      by_options[typeid(Options)] = [](const OptimizerOptions& options,
                                       std::vector<ParameterGroup> groups,
                                       std::shared_ptr<Parts> parts) {
        return options.as<Options>()->make(std::move(groups), std::move(parts));
      };
    });
    return Makers{.mutex = {}, .by_options = std::move(by_options)};
  }();
  return all;
}

OptimizerMaker maker_of(const OptimizerOptions& options) {
  Makers& all = makers();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_options.find(options.type());
  if (found == all.by_options.end())
    throw UsageError("no optimizer has options of the type {}: call register_optimizer() first",
                     options.type().name());
  return found->second;
}

}  // namespace

void register_optimizer_maker(std::type_index options, OptimizerMaker maker) {
  Makers& all = makers();
  const std::lock_guard lock(all.mutex);
  all.by_options[options] = std::move(maker);
}

std::int64_t Optimizer::state_bytes() const {
  std::int64_t bytes = 0;
  for (const NamedTensor& one : state()) bytes += static_cast<std::int64_t>(one.tensor.nbytes());
  return bytes;
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options,
                                          std::vector<ParameterGroup> groups,
                                          std::shared_ptr<Parts> parts) {
  const OptimizerMaker make = maker_of(options);
  check_options(name_of(options), options);
  return make(options, std::move(groups), std::move(parts));
}

}  // namespace lockstep::optim
