#include <lockstep/distributed/stages_differ.h>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/data_parallel/difference.h>

namespace lockstep {

void check_stages_differ(const torch::nn::Module& stage, comm::Communicator& group) {
  std::vector<std::string> lines;
  for (const auto& item : stage.named_parameters())
    lines.push_back(fmt::format("{} [{}]", item.key(), fmt::join(item.value().sizes(), ", ")));
  if (group.size() == 1 || data_parallel::first_difference(lines, group)) return;
  throw UsageError(
      "all {} ranks of the pipeline wrap the same parameters ('{}' and so on), so that each would "
      "train the whole model and none a stage of it: give wrap_model() only the layers of this "
      "rank's stage, under the names that they have in the whole model, and run them with "
      "pipeline::Pipeline; or take ParallelMode::DDP or FSDP",
      group.size(), lines.empty() ? "" : stage.named_parameters().front().key());
}

}  // namespace lockstep
