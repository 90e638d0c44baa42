#include <lockstep/nn/targets.h>

#include <spdlog/fmt/ranges.h>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>

namespace lockstep::nn::internal {

std::int64_t count_targets(const char* function, const Targets& given, const TargetShape& shape) {
  const at::Tensor& targets = given.tensor;
  if (targets.scalar_type() != at::kLong || targets.dim() != 1 || targets.size(0) != shape.rows)
    throw UsageError("{}: targets are {} of the shape [{}]: they must be Long (int64) of the shape "
                     "[{}], one for "
                     "each row",
                     function, c10::toString(targets.scalar_type()),
                     fmt::join(targets.sizes(), ", "), shape.rows);
  // Eight bytes a row are nothing beside a row of logits, on whichever device.
  const at::Tensor here = (given.on_host.defined() ? given.on_host : targets.cpu()).contiguous();
  if (!here.is_cpu() || here.sizes() != targets.sizes() || here.scalar_type() != at::kLong)
    throw UsageError("{}: targets are [{}], and what is said to be the same on the host is {} of "
                     "the shape [{}] on {}",
                     function, fmt::join(targets.sizes(), ", "), c10::toString(here.scalar_type()),
                     fmt::join(here.sizes(), ", "), here.device().str());
  const auto* values = here.data_ptr<std::int64_t>();
  std::int64_t count = 0;
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    if (values[row] == shape.ignore_index) continue;
    if (values[row] < 0 || values[row] >= shape.vocabulary)
      throw UsageError("{}: the target of row {} is {}, outside the vocabulary of {}: targets are "
                       "0 to {}, or {} "
                       "for rows to leave out",
                       function, row, values[row], shape.vocabulary, shape.vocabulary - 1,
                       shape.ignore_index);
    ++count;
  }
  return count;
}

}  // namespace lockstep::nn::internal
