#include <lockstep/parallel/pipeline/agreement.h>

#include <exception>
#include <string>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/parallel/pipeline/schedule/schedule.h>
#include <lockstep/parallel/pipeline/schedule/schedule_file.h>

namespace lockstep::pipeline {

namespace {

void check_stages(const Schedule& schedule, const std::map<int, Stage>& stages, int rank) {
  std::vector<int> wanted, given;
  for (int stage = 0; stage < schedule.num_stages(); ++stage)
    if (schedule.rank_of_stage[static_cast<std::size_t>(stage)] == rank) wanted.push_back(stage);
  for (const auto& [index, stage] : stages) {
    given.push_back(index);
    if (!stage.forward) throw UsageError("stage {} of the pipeline has no forward", index);
  }
  if (wanted != given)
    throw UsageError("the schedule '{}' has the stages [{}] on rank {} of the pipeline, which was "
                     "given [{}]",
                     schedule.name, fmt::join(wanted, ", "), rank, fmt::join(given, ", "));
}

void check_tied(const Schedule& schedule, const std::vector<TiedParameter>& tied, int rank) {
  for (const TiedParameter& parameter : tied) {
    bool mine = false;
    for (const int stage : parameter.stages) {
      if (stage < 0 || stage >= schedule.num_stages())
        throw UsageError("a parameter is said to be that of stage {}, and the schedule '{}' has {}",
                         stage, schedule.name, schedule.num_stages());
      mine |= schedule.rank_of_stage[static_cast<std::size_t>(stage)] == rank;
    }
    if (mine && !parameter.mine.defined())
      throw UsageError("rank {} of the pipeline has one of the stages [{}] that share a parameter, "
                       "and did not say which it is",
                       rank, fmt::join(parameter.stages, ", "));
  }
}

void check_given(const Schedule& schedule, const std::map<int, Stage>& stages,
                 const PipelineOptions& options, const comm::Communicator& group) {
  check(schedule);
  if (schedule.num_ranks() != group.size())
    throw UsageError("the schedule '{}' is for {} ranks, and the pipeline '{}' has {}",
                     schedule.name, schedule.num_ranks(), group.name(), group.size());
  check_stages(schedule, stages, group.rank());
  check_tied(schedule, options.tied, group.rank());
}

std::int64_t number_of(const std::string& text) {
  return static_cast<std::int64_t>(hash_text(text));
}

std::string text_of(const std::vector<TiedParameter>& tied) {
  std::string text;
  for (const TiedParameter& parameter : tied)
    text += fmt::format("[{}]", fmt::join(parameter.stages, ", "));
  return text;
}

}  // namespace

std::shared_ptr<comm::Communicator> agreed_group(const Schedule& schedule,
                                                 const std::map<int, Stage>& stages,
                                                 const PipelineOptions& options,
                                                 comm::Communicator& group) {
  std::exception_ptr refused;
  try {
    check_given(schedule, stages, options, group);
  } catch (const UsageError&) {
    refused = std::current_exception();
  }
  const at::Tensor mine =
      at::tensor({refused ? std::int64_t{1} : std::int64_t{0}, number_of(to_text(schedule)),
                  number_of(text_of(options.tied))},
                 at::kLong);
  const at::Tensor all = at::empty({group.size(), 3}, at::kLong);
  group.all_gather(all, mine).wait();
  if (refused) std::rethrow_exception(refused);
  const auto said = all.accessor<std::int64_t, 2>();
  for (int rank = 0; rank < group.size(); ++rank) {
    if (said[rank][0] != 0)
      throw UsageError("rank {} of the pipeline '{}' was given what cannot be run: its own error "
                       "says what",
                       rank, group.name());
    for (const int number : {1, 2})
      if (said[rank][number] != said[0][number])
        throw UsageError("ranks 0 and {} of the pipeline '{}' were given different {}: give all "
                         "ranks the same",
                         rank, group.name(), number == 1 ? "schedules" : "tied parameters");
  }
  return group.split(0, group.rank(), fmt::format("{}, pipeline", group.name()));
}

}  // namespace lockstep::pipeline
