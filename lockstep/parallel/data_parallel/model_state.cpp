#include <lockstep/parallel/data_parallel/model_state.h>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>

namespace lockstep::data_parallel {

namespace {

std::string mebibytes(std::int64_t bytes) {
  return fmt::format("{:.2f} MiB", static_cast<double>(bytes) / (1 << 20));
}

}  // namespace

double StepTotals::count() const { return values[0].item<double>(); }
double StepTotals::mean_loss() const { return (values[1] / values[0]).item<double>(); }

std::string MemoryReport::text() const {
  const double per_parameter =
      num_parameters == 0 ? 0
                          : static_cast<double>(at_rest()) / static_cast<double>(num_parameters);
  return fmt::format(
             "this rank's memory for {} parameters, {} rank{} to a copy\n"
             "  at rest   {} ({:.3f} bytes a parameter): parameters {}, gradients {}, "
             "optimizer {}, buffers {}\n"
             "  in a step {} more for gathered units at most, {} for gradients on their way",
             num_parameters, num_ranks, num_ranks == 1 ? "" : "s", mebibytes(at_rest()),
             per_parameter, mebibytes(parameters), mebibytes(gradients), mebibytes(optimizer),
             mebibytes(buffers), mebibytes(gathered_peak), mebibytes(gradients_on_their_way_peak)) +
         (on_host == 0 ? ""
                       : fmt::format("\n  on host   {} of what was offloaded", mebibytes(on_host)));
}

}  // namespace lockstep::data_parallel
