// Row 16: hosts leave and join while a model is trained.
#include <signal.h>

#include <gmock/gmock.h>

#include "disturbed.h"

namespace lockstep::faults {
namespace {

class WholeRow16NodesComeAndGo : public DisturbedHosts {};

// The training has no dropout, because each rank draws its own.
const Words kTraining = {"--epochs", "60", "--batch", "60", "--dropout", "0"};

// There are 4 hosts, then 3, then 5. A step has the same 60 samples on any number of them.
TEST_F(WholeRow16NodesComeAndGo, TrainingGoesOnOnTheNewSize) {
  HOSTS_OR_SKIP(5);
  Job job{.num_ranks = 1,
          .launcher = {"--nnodes", "3:5", "--max-restarts", "5", "--rdzv-last-call", "3"},
          .rank = kTraining};
  job.rank.insert(job.rank.end(), {"--pace", "100"});
  std::vector<Launched> hosts;
  for (int host = 0; host < 4; ++host) hosts.push_back(start_on(host, job));
  ASSERT_TRUE(reaches(6)) << hosts[0].error();
  hosts[1].kill(SIGKILL);
  ASSERT_TRUE(reaches(7, 1)) << hosts[0].error();
  Launched back = start_on(1, job);
  Launched fresh = start_on(4, job);
  ASSERT_TRUE(launch::testing::eventually(milliseconds(180'000), [&] {
    const auto all = events();
    return std::ranges::any_of(
        all, [](const Event& event) { return event.kind == "step" && event.rank == 4; });
  })) << hosts[0].error();
  for (Launched* host : {&hosts[0], &hosts[2], &hosts[3], &back, &fresh}) {
    EXPECT_EQ(host->wait(milliseconds(180'000)), 0) << host->error();
    expect_nothing_left(*host);
  }
  const auto fault = only_fault(hosts[0]);
  EXPECT_EQ(fault["kind"], "node_lost");
  EXPECT_EQ(fault["host"], "host1");
  expect_each_sample_once();
  // Compares with a run on four ranks from the first step to the last; the results differ only by
  // the rounding of sums over other numbers of ranks.
  const Result& whole = undisturbed(4, kTraining);
  const Result disturbed = result();
  ASSERT_EQ(disturbed.losses.size(), whole.losses.size());
  for (const auto& [step, loss] : whole.losses)
    EXPECT_NEAR(disturbed.losses.at(step), loss, 1e-4 * loss) << "step " << step;
}

}  // namespace
}  // namespace lockstep::faults
