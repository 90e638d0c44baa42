// A run keeps its batch, and so its losses, with any number of ranks that it goes on with.
#include <csignal>
#include <cstdlib>
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/net/socket.h>

#include "tests/base/files.h"
#include "tests/train/run/training.h"

namespace lockstep::train::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;

// The last step of an epoch has fewer sequences than the ranks share evenly.
struct Steady : Training {
  Steady() {
    set("/scheduler", {{"type", "WarmupLR"}, {"params", {{"warmup_num_steps", 2}}}});
    set("/model/dropout", 0.1);
  }
};

void expect_same(const std::map<int, double>& got, const std::map<int, double>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (const auto& [step, loss] : wanted)
    EXPECT_NEAR(got.at(step), loss, 2e-5 * loss) << "step " << step;
}

std::int64_t samples_seen(const Training& training, const std::string& run) {
  return checkpoint::CheckpointReader(training.checkpoint(run)).manifest().state.samples_seen;
}

struct Sizes {
  const char* name;
  json changes;  // changes to the config, in one object
  int batch;
  std::vector<int> ranks;
  const char* kept;  // printed when the run goes on with the second number of ranks
};

TEST(Sizes, ARunGoesOnWithTheBatchThatItBeganWith) {
  const std::vector<Sizes> all = {
      {"accumulated",
       {{"train_batch_size", "auto"},
        {"train_micro_batch_size_per_gpu", 2},
        {"gradient_accumulation_steps", 1}},
       8,
       {4, 3, 5},
       "a step has the 8 samples that it had on 4 ranks: 2 or 3 of each of 3 ranks, in 2 passes of "
       "at most 2"},
      {"shards of a batch that nothing divides",
       {{"train_batch_size", 7}, {"sharding_strategy", "FULL_SHARD"}},
       7,
       {4, 3, 5},
       "a step has the 7 samples that it had on 4 ranks: 2 or 3 of each of 3 ranks, in 2 passes of "
       "at most 2"},
      {"a pipeline",
       {{"train_batch_size", 8},
        {"train_micro_batch_size_per_gpu", 2},
        {"gradient_accumulation_steps", 2},
        {"parallel", {{"pipeline", 2}}}},
       8,
       {4, 6},
       "a step has the 8 samples that it had on 2 shares of the data: 2 or 3 of each of 3 shares "
       "of "
       "the data, in 2 passes of at most 2"},
  };
  for (const Sizes& one : all) {
    SCOPED_TRACE(one.name);
    Steady training;
    training.config.update(one.changes);
    // The same batch on one rank, where nothing else is changed.
    const json alone = {{"train_batch_size", one.batch},
                        {"train_micro_batch_size_per_gpu", "auto"},
                        {"gradient_accumulation_steps", "auto"},
                        {"max_steps", 6 * one.ranks.size()}};
    Steady undisturbed;
    undisturbed.config.update(alone);
    Launched whole = undisturbed.start(1);
    ASSERT_EQ(whole.wait(milliseconds(180'000)), 0) << whole.output() << whole.error();
    int steps = 0;
    for (const int num_ranks : one.ranks) {
      steps += 6;
      training.set("/max_steps", steps);
      Launched run = training.start(num_ranks);
      ASSERT_EQ(run.wait(milliseconds(180'000)), 0) << run.output() << run.error();
      if (steps == 12) {
        EXPECT_THAT(run.output(), HasSubstr(one.kept));
      }
      EXPECT_THAT(run.output(), Not(HasSubstr("other than in the checkpoint"))) << run.output();
    }
    expect_same(training.losses(), undisturbed.losses());
    EXPECT_EQ(samples_seen(training, "run"), samples_seen(undisturbed, "run"));
  }
}

// A new batch size that is asked for takes effect, and is announced.
TEST(Sizes, AnotherBatchIsAnnounced) {
  Steady training;
  training.set("/train_batch_size", "auto").set("/train_micro_batch_size_per_gpu", 4);
  training.set("/max_steps", 2).train(2);
  training.set("/max_steps", 4).set("/train_micro_batch_size_per_gpu", 2);
  Launched run = training.start(2);
  EXPECT_EQ(run.wait(milliseconds(60'000)), 0) << run.error();
  EXPECT_THAT(run.output(), HasSubstr("train_micro_batch_size_per_gpu is 2, was 4"));
  EXPECT_THAT(run.output(), HasSubstr("a step has 4 samples, had 8"));
  EXPECT_EQ(samples_seen(training, "run"), 2 * 8 + 2 * 4);
}

// Launchers like those of several hosts, each with one rank.
class ElasticTraining {
 public:
  ElasticTraining(Training& training, std::string nodes, std::string last_call_seconds)
      : training_(training), nodes_(std::move(nodes)), last_call_(std::move(last_call_seconds)) {}

  Launched join() {
    std::vector<std::string> words = training_.command();
    words.insert(words.begin(), {LOCKSTEP_PROGRAM, "run", "--nnodes", nodes_, "--max-restarts", "5",
                                 "--rdzv-endpoint", "127.0.0.1:" + std::to_string(port_),
                                 "--rdzv-last-call", last_call_, "--secret-file", secret_});
    return Launched(std::move(words));
  }

  // Waits until the run is this many steps further than now.
  void expect_steps(int more) const {
    const int wanted = newest_step() + more;
    EXPECT_TRUE(
        launch::testing::eventually(milliseconds(90'000), [&] { return newest_step() >= wanted; }))
        << "still at step " << newest_step() << " of " << wanted;
  }

 private:
  // The last step that was written; 0 before the first.
  int newest_step() const {
    const fs::path metrics = training_.output() / "metrics.csv";
    if (!fs::exists(metrics)) return 0;
    const auto lines = launch::testing::lines_of(lockstep::testing::read_file(metrics));
    return lines.size() < 2 ? 0 : std::atoi(lines.back().c_str());
  }

  Training& training_;
  std::string nodes_;
  std::string last_call_;
  launch::testing::Folder folder_;
  std::string secret_ = folder_.write("secret", std::string(32, 's'), 0600);
  int port_ = net::free_port("127.0.0.1");
};

std::string errors_of(const std::vector<Launched>& hosts) {
  std::string all;
  for (const Launched& host : hosts) all += host.error() + "--\n";
  return all;
}

// Expects a text from whichever host has the main rank.
void expect_said(const std::vector<Launched>& hosts, const std::string& text) {
  const auto said = [&] {
    std::string all;
    for (const Launched& host : hosts) all += host.output();
    return all;
  };
  EXPECT_TRUE(launch::testing::eventually(milliseconds(90'000),
                                          [&] { return said().find(text) != std::string::npos; }))
      << text << "\n"
      << said() << errors_of(hosts);
}

TEST(Sizes, AnElasticJobHasTheLossesOfOneWhoseHostsStay) {
  Steady training;
  training.set("/train_batch_size", 8).set("/train_micro_batch_size_per_gpu", 2);
  training.set("/checkpoint", {{"interval", 1}, {"async", false}}).set("/max_steps", 100'000);
  training.set("/validation/interval", 0);
  ElasticTraining job(training, "3:5", "5");
  std::vector<Launched> hosts;
  for (int host = 0; host < 4; ++host) hosts.push_back(job.join());
  expect_said(hosts, "4 ranks on ");
  job.expect_steps(8);
  hosts[3].kill(SIGKILL);
  expect_said(hosts, "a step has the 8 samples that it had on 4 ranks");
  job.expect_steps(8);
  hosts.push_back(job.join());
  hosts.push_back(job.join());
  expect_said(hosts, "of each of 5 ranks");
  job.expect_steps(8);
  for (const std::size_t host : {0u, 1u, 2u, 4u, 5u}) hosts[host].kill(SIGINT);
  for (const std::size_t host : {0u, 1u, 2u, 4u, 5u})
    EXPECT_EQ(hosts[host].wait(milliseconds(60'000)), 130) << hosts[host].error();
  const int steps = training.losses().rbegin()->first;
  training.set("/max_steps", steps).set("/checkpoint/interval", 0);
  Launched undisturbed = training.start(1, "undisturbed");
  ASSERT_EQ(undisturbed.wait(milliseconds(180'000)), 0) << undisturbed.error();
  expect_same(training.losses(), training.losses("undisturbed"));
  EXPECT_EQ(samples_seen(training, "run"), samples_seen(training, "undisturbed"));
}

// All ranks are asked to leave when another host comes; their state is in their memory then.
TEST(Sizes, WhoLeavesForAnotherHostGoesOnFromMemory) {
  Steady training;
  training.set("/train_batch_size", 8).set("/train_micro_batch_size_per_gpu", 2);
  training.set("/checkpoint", {{"interval", 0}, {"memory_interval", 100'000}});
  training.set("/max_steps", 100'000).set("/validation/interval", 0);
  ElasticTraining job(training, "2:3", "1");
  std::vector<Launched> hosts;
  for (int host = 0; host < 2; ++host) hosts.push_back(job.join());
  expect_said(hosts, "2 ranks on ");
  job.expect_steps(3);
  hosts.push_back(job.join());
  expect_said(hosts, "left off after step ");
  expect_said(hosts, "3 ranks on ");
  job.expect_steps(3);
  for (const Launched& host : hosts) host.kill(SIGINT);
  for (Launched& host : hosts) EXPECT_EQ(host.wait(milliseconds(60'000)), 130) << host.error();
  EXPECT_THAT(errors_of(hosts), HasSubstr("(copies in the ranks' memory)"));
  EXPECT_THAT(errors_of(hosts), Not(HasSubstr("(the checkpoint ")));
  const int steps = training.losses().rbegin()->first;
  training.set("/max_steps", steps).set("/checkpoint", {{"interval", 0}});
  training.train(1, "undisturbed");
  expect_same(training.losses(), training.losses("undisturbed"));
}

// The run has begun, and has saved nothing yet.
TEST(Sizes, AnElasticJobKeepsItsBatchBeforeItsFirstCheckpoint) {
  Steady training;
  training.set("/train_batch_size", "auto").set("/train_micro_batch_size_per_gpu", 2);
  training.set("/checkpoint/interval", 0).set("/max_steps", 100'000);
  training.set("/validation/interval", 1).set("/validation/batches", 0);
  ElasticTraining job(training, "2:3", "60");  // it begins with all three hosts
  std::vector<Launched> hosts;
  for (int host = 0; host < 3; ++host) hosts.push_back(job.join());
  expect_said(hosts, "3 ranks on ");
  job.expect_steps(3);
  hosts[2].kill(SIGKILL);
  expect_said(hosts, "a step has the 6 samples that it had on 3 ranks: 3 of each of 2 ranks, in 2 "
                     "passes of at most 2");
  for (const std::size_t host : {0u, 1u}) hosts[host].kill(SIGINT);
  for (const std::size_t host : {0u, 1u}) hosts[host].wait(milliseconds(60'000));
}

}  // namespace
}  // namespace lockstep::train::testing
