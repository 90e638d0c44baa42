// The checks that the ledger adds to Gloo: calls that differ, ranks that do not come, ranks that
// are gone.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <thread>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/flight/journal.h>
#include <lockstep/flight/report.h>

#include "gloo.h"

namespace lockstep::comm::backends {
namespace {

using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;

class GlooFaults : public Gloo {};

// Each rank makes a call of its own; all must end with the same mismatch.
using Act = std::function<Work(Communicator&)>;

struct Outcome {
  std::string text;
  Fault fault = Fault::aborted;
  std::vector<int> ranks;
  double seconds = 0;
};

// Ranks 0 and 1 act alike, rank 2 acts differently; the clock runs from rank 2's call.
std::map<int, Outcome> disagree(const JobStore& job, const Act& most, const Act& other,
                                LedgerMode mode = LedgerMode::automatic) {
  std::map<int, Outcome> outcomes;
  std::mutex mutex;
  std::atomic<Clock::rep> second_call{0};
  run_ranks(3, [&](int rank) {
    auto group = gloo(job, rank, 3, milliseconds(20'000), mode);
    Outcome outcome;
    try {
      at::Tensor first = at::ones({4}, at::kFloat);
      group->all_reduce(first).wait();
      if (rank == 2) {
        std::this_thread::sleep_for(milliseconds(100));
        second_call = Clock::now().time_since_epoch().count();
      }
      // In `beside` mode a wrong call may return; then a later call throws.
      Work work = rank == 2 ? other(*group) : most(*group);
      work.wait();
      for (int i = 0; i < 1000; ++i) {
        std::this_thread::sleep_for(milliseconds(10));
        group->barrier().wait();
      }
      ADD_FAILURE() << "rank " << rank << " noticed nothing";
    } catch (const CommError& error) {
      outcome.text = error.what();
      outcome.fault = error.fault();
      outcome.ranks = error.ranks();
      const auto since = Clock::now() - Clock::time_point(Clock::duration(second_call.load()));
      outcome.seconds = std::chrono::duration<double>(since).count();
    }
    // The group is dead and gives the reason.
    EXPECT_THROW(group->barrier(), CommError);
    std::lock_guard lock(mutex);
    outcomes[rank] = outcome;
  });
  return outcomes;
}

void expect_mismatch(const std::map<int, Outcome>& outcomes, const std::string& most,
                     const std::string& other) {
  ASSERT_EQ(outcomes.size(), 3u);
  for (const auto& [rank, outcome] : outcomes) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    EXPECT_EQ(outcome.fault, Fault::mismatch) << outcome.text;
    EXPECT_THAT(outcome.ranks, AnyOf(ElementsAre(0, 2), ElementsAre(1, 2)));
    EXPECT_THAT(outcome.text, HasSubstr(most));
    EXPECT_THAT(outcome.text, HasSubstr(other));
    EXPECT_LT(outcome.seconds, 10.0) << "not by the deadline";
  }
}

Work reduce(Communicator& group, at::Tensor tensor, ReduceOp op = ReduceOp::sum) {
  return group.all_reduce(std::move(tensor), op);
}

TEST_F(GlooFaults, FindsADifferentOperation) {
  const auto outcomes = disagree(
      job_, [](auto& group) { return reduce(group, at::ones({6}, at::kFloat)); },
      [](auto& group) { return group.broadcast(at::ones({6}, at::kFloat), 0); });
  expect_mismatch(outcomes, "all_reduce #2 (sum of 6 float32)", "broadcast #2 (6 float32");
}

TEST_F(GlooFaults, FindsADifferentDtype) {
  for (const LedgerMode mode : {LedgerMode::before, LedgerMode::beside}) {
    const auto outcomes = disagree(
        job_, [](auto& group) { return reduce(group, at::ones({6}, at::kFloat)); },
        [](auto& group) { return reduce(group, at::ones({6}, at::kInt)); }, mode);
    expect_mismatch(outcomes, "6 float32", "6 int32");
  }
}

TEST_F(GlooFaults, FindsADifferentSize) {
  // Gloo alone would end the process here.
  const auto outcomes = disagree(
      job_, [](auto& group) { return reduce(group, at::ones({6}, at::kFloat)); },
      [](auto& group) { return reduce(group, at::ones({60'000}, at::kFloat)); });
  expect_mismatch(outcomes, "6 float32", "60000 float32");
}

TEST_F(GlooFaults, FindsADifferentReduction) {
  const auto outcomes = disagree(
      job_, [](auto& group) { return reduce(group, at::ones({6}, at::kInt), ReduceOp::max); },
      [](auto& group) { return reduce(group, at::ones({6}, at::kInt), ReduceOp::min); });
  expect_mismatch(outcomes, "max of 6 int32", "min of 6 int32");
}

TEST_F(GlooFaults, FindsADifferentRoot) {
  const auto outcomes = disagree(
      job_, [](auto& group) { return group.broadcast(at::ones({6}, at::kInt), 0); },
      [](auto& group) { return group.broadcast(at::ones({6}, at::kInt), 1); });
  expect_mismatch(outcomes, "from root 0", "from root 1");
}

TEST_F(GlooFaults, FindsASkippedCall) {
  const auto outcomes = disagree(
      job_,
      [](auto& group) {
        reduce(group, at::ones({6}, at::kInt));
        return reduce(group, at::ones({8}, at::kInt));
      },
      [](auto& group) { return reduce(group, at::ones({8}, at::kInt)); });
  expect_mismatch(outcomes, "#2 (sum of 6 int32)", "#2 (sum of 8 int32)");
}

TEST_F(GlooFaults, FindsListsCutDifferently) {
  const auto list = [](std::int64_t a, std::int64_t b) {
    return [a, b](Communicator& group) {
      return group.all_reduce({at::ones({a}, at::kInt), at::ones({b}, at::kInt)});
    };
  };
  const auto outcomes = disagree(job_, list(2, 4), list(3, 3));
  expect_mismatch(outcomes, "2, 4 elements", "3, 3 elements");
}

TEST_F(GlooFaults, FindsAllToAllPartsThatDoNotFit) {
  const auto parts = [](std::int64_t length) {
    return [length](Communicator& group) {
      std::vector<at::Tensor> inputs;
      std::vector<at::Tensor> outputs;
      for (int peer = 0; peer < 3; ++peer) {
        inputs.push_back(at::ones({length}, at::kFloat));
        outputs.push_back(at::ones({length}, at::kFloat));
      }
      return group.all_to_all(outputs, inputs);
    };
  };
  for (const auto& [rank, outcome] : disagree(job_, parts(5), parts(9))) {
    EXPECT_EQ(outcome.fault, Fault::mismatch) << outcome.text;
    EXPECT_THAT(outcome.text, HasSubstr("all_to_all"));
    EXPECT_LT(outcome.seconds, 10.0) << "not by the deadline";
  }
}

TEST_F(GlooFaults, FindsAnExchangeThatDoesNotFit) {
  std::atomic<int> caught{0};
  run_ranks(2, [&](int rank) {
    auto group = gloo(job_, rank, 2);
    at::Tensor tensor = at::ones({rank == 0 ? 4 : 5}, at::kFloat);
    try {
      group->exchange({rank == 0 ? send_to(1, tensor) : receive_from(0, tensor)}).wait();
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_EQ(error.fault(), Fault::mismatch) << error.what();
      EXPECT_THAT(error.what(), HasSubstr("4 float32"));
      EXPECT_THAT(error.what(), HasSubstr("5 float32"));
      ++caught;
    }
  });
  EXPECT_EQ(caught, 2);
}

TEST_F(GlooFaults, NamesARankThatDoesNotCome) {
  std::atomic<int> caught{0};
  run_ranks(3, [&](int rank) {
    auto group = gloo(job_, rank, 3);
    group->barrier().wait();
    if (rank == 1) {
      const Deadline longest = Deadline::after(milliseconds(15'000));
      while (caught < 2 && !longest.passed()) std::this_thread::sleep_for(milliseconds(10));
      // The others gave up, and this rank learns that from the group.
      EXPECT_THROW(group->barrier(), CommError);
      return;
    }
    at::Tensor tensor = at::ones({100}, at::kFloat);
    const auto start = Clock::now();
    try {
      group->all_reduce(tensor, ReduceOp::sum, {.timeout = milliseconds(500)}).wait();
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_EQ(error.fault(), Fault::timeout) << error.what();
      EXPECT_THAT(error.ranks(), ElementsAre(1)) << error.what();
      EXPECT_THAT(error.what(), HasSubstr("all_reduce"));
      EXPECT_THAT(error.what(), HasSubstr("has not made this call"));
      EXPECT_LT(Clock::now() - start, milliseconds(10'000)) << "by its own deadline";
      ++caught;
    }
  });
  EXPECT_EQ(caught, 2);
}

// For a group that is not the world, the error also names the job's ranks, and every rank writes a
// dump, as with our own transports.
TEST_F(GlooFaults, LeavesDumpsOfAPartOfTheJob) {
  std::string pattern = (std::filesystem::temp_directory_path() / "lockstep-gloo-XXXXXX").string();
  ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
  const std::filesystem::path flight = pattern;
  std::atomic<int> caught{0};
  run_ranks(4, [&](int rank) {
    GroupInfo info = group_info("world", rank, 4);
    info.journal = std::make_shared<flight::Journal>(flight);
    const auto world = make_group("gloo", info, {.store = job_.connect()});
    const auto pair = world->split(rank / 2, rank, "pair");
    if (rank == 3) std::this_thread::sleep_for(milliseconds(1500));
    if (rank != 2) return;
    try {
      pair->all_reduce(at::ones({4}), ReduceOp::sum, {.timeout = milliseconds(500)}).wait();
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), HasSubstr("timeout of rank 1 (job rank 3)"));
      EXPECT_THAT(error.global_ranks(), ElementsAre(3));
      ++caught;
    }
  });
  EXPECT_EQ(caught, 1);
  EXPECT_THAT(flight::merged_report(flight),
              testing::StartsWith("Rank 3 never called all_reduce #1 of group 'pair' "
                                  "(gloo_faults_test.cpp:"));
  std::filesystem::remove_all(flight);
}

TEST_F(GlooFaults, NamesRanksThatDoNotComeToConnect) {
  run_ranks(1, [&](int) {
    try {
      gloo(job_, 0, 3, milliseconds(300));
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_EQ(error.fault(), Fault::timeout);
      EXPECT_THAT(error.ranks(), ElementsAre(1, 2));
    }
  });
}

TEST_F(GlooFaults, AbortsEverywhere) {
  std::atomic<int> caught{0};
  run_ranks(3, [&](int rank) {
    auto group = gloo(job_, rank, 3);
    group->barrier().wait();
    try {
      if (rank == 2) {
        std::this_thread::sleep_for(milliseconds(200));
        group->abort("loss is not a number");
        group->barrier();
      } else {
        group->barrier().wait();
      }
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_EQ(error.fault(), Fault::aborted) << error.what();
      EXPECT_THAT(error.what(), HasSubstr("loss is not a number"));
      ++caught;
    }
  });
  EXPECT_EQ(caught, 3);
}

TEST_F(GlooFaults, NamesAKilledRank) {
  const int secret_fd = job_.secret().to_inheritable_descriptor();
  const std::string address = job_.address().text();
  const pid_t victim = ::fork();
  if (victim == 0) {
    ::execl("/proc/self/exe", "engines_test", "--victim", "1", "2", address.c_str(),
            std::to_string(secret_fd).c_str(), nullptr);
    ::_exit(127);
  }
  ::close(secret_fd);
  run_ranks(1, [&](int) {
    auto group = gloo(job_, 0, 2);
    at::Tensor tensor = at::ones({100}, at::kFloat);
    group->all_reduce(tensor).wait();
    Work work = group->all_reduce(tensor);
    ::kill(victim, SIGKILL);
    const auto start = Clock::now();
    try {
      work.wait();
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_EQ(error.fault(), Fault::engine) << error.what();
      EXPECT_THAT(error.ranks(), ElementsAre(1)) << error.what();
      EXPECT_LT(Clock::now() - start, milliseconds(10'000)) << "not by the deadline";
    }
  });
  ::waitpid(victim, nullptr, 0);
}

}  // namespace
}  // namespace lockstep::comm::backends

// Makes one call and then waits to be killed.
int run_victim(int rank, int size, const char* store, int secret_fd) {
  using namespace lockstep;
  auto client = std::make_shared<store::Client>(net::Address::parse(store, 0, "the store"),
                                                net::Secret::from_descriptor(secret_fd),
                                                Deadline::after(milliseconds(10'000)));
  auto group =
      comm::make_group("gloo", comm::backends::group_info("world", rank, size), {.store = client});
  at::Tensor tensor = at::ones({100}, at::kFloat);
  group->all_reduce(tensor).wait();
  std::this_thread::sleep_for(std::chrono::seconds(30));
  return 0;
}
