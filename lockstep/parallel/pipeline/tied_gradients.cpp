#include <lockstep/parallel/pipeline/tied_gradients.h>

#include <set>
#include <utility>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

namespace lockstep::pipeline {

TiedGradients::TiedGradients(std::vector<TiedParameter> tied, const Schedule& schedule,
                             comm::Communicator& group) {
  for (TiedParameter& one : tied) {
    std::set<int> ranks;
    for (const int stage : one.stages)
      ranks.insert(schedule.rank_of_stage.at(static_cast<std::size_t>(stage)));
    if (ranks.size() < 2) continue;
    auto sharing =
        group.split(ranks.contains(group.rank()) ? 0 : -1, group.rank(),
                    fmt::format("{}, tied stages {}", group.name(), fmt::join(one.stages, ",")));
    if (sharing != nullptr) tied_.push_back({std::move(one.mine), std::move(sharing), {}});
  }
}

void TiedGradients::put_aside() {
  for (Tied& tied : tied_) tied.before = std::exchange(tied.parameter.mutable_grad(), {});
}

void TiedGradients::sum() {
  for (Tied& tied : tied_) {
    at::Tensor& gradient = tied.parameter.mutable_grad();
    if (!gradient.defined())
      gradient = at::zeros_like(tied.parameter, at::MemoryFormat::Contiguous);
    gradient = gradient.contiguous();
    tied.group->all_reduce(gradient).wait();
    // Into the tensor that was there: somebody may hold on to it.
    if (tied.before.defined()) gradient = tied.before.add_(gradient);
    tied.before = at::Tensor();
  }
}

void TiedGradients::abort(const std::string& reason) {
  for (const Tied& tied : tied_) tied.group->abort(reason);
}

}  // namespace lockstep::pipeline
