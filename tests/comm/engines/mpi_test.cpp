// MPI behind our interface: mpirun runs all tests on every rank. --mpi selects the tests of working
// calls, --mpi-faults those of failures.
#include <chrono>
#include <thread>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/world/backends.h>
#ifdef LOCKSTEP_TEST_MPI
#include <lockstep/comm/backends/mpi/mpi.h>
#endif

#include "operations.h"
#include "ranks.h"

#ifdef LOCKSTEP_TEST_MPI

namespace lockstep::comm::backends {
namespace {

using testing::HasSubstr;

std::shared_ptr<Communicator> mpi(LedgerMode mode = LedgerMode::automatic) {
  const MpiWorld world = mpi_world();
  return make_group("mpi", group_info("world", world.rank, world.size),
                    {.timeout = milliseconds(20'000), .ledger = mode});
}

TEST(Mpi, ComputesEverything) {
  auto group = mpi();
  EXPECT_EQ(group->backend(), "mpi");
  EXPECT_EQ(group->size(), 3);
  check_operations(*group);
  check_forms(*group);
}

TEST(Mpi, Splits) {
  auto group = mpi();
  check_splits(*group);
}

TEST(Mpi, AGroupOutlivesTheOneItCameFrom) {
  auto world = mpi(LedgerMode::before);
  auto child = world->split(0, world->rank(), "child");
  world.reset();
  check_forms(*child);
}

TEST(Mpi, ComparesBeforeACall) {
  auto group = mpi(LedgerMode::before);
  check_forms(*group);
}

TEST(Mpi, TellsTheStoresAddress) {
  const MpiWorld world = mpi_world();
  const Deadline deadline = Deadline::after(milliseconds(10'000));
  std::optional<JobStore> job;
  std::optional<BootstrapInfo> mine;
  if (world.rank == 0) {
    job.emplace();
    mine = BootstrapInfo{.store = job->address(), .secret = job->secret()};
  }
  const BootstrapInfo info = exchange_over_mpi(mine, deadline);
  store::Client client(info.store, info.secret, deadline);
  client.add("ranks", 1, deadline);
  while (client.get("ranks", deadline) != "3") std::this_thread::sleep_for(milliseconds(1));
  // The rank that hosts the store leaves last.
  client.add("left", 1, deadline);
  while (world.rank == 0 && client.get("left", deadline) != "3")
    std::this_thread::sleep_for(milliseconds(1));
}

TEST(Mpi, RefusesRanksThatMpirunDidNotStart) {
  const MpiWorld world = mpi_world();
  EXPECT_THROW(make_group("mpi", group_info("world", world.rank, world.size + 1), {}), UsageError);
}

// After a failure MPI cannot be finalised, and mpirun ends the job when the first process exits
// without finalising: so no process exits before all are done.
class MpiFaults : public testing::Test {
 public:
  static void TearDownTestSuite() {
    mpi()->barrier().wait();
    std::this_thread::sleep_for(milliseconds(500));
  }
};

TEST_F(MpiFaults, FindsAMismatchOnEveryRank) {
  auto group = mpi(LedgerMode::before);
  const bool other = group->rank() == 2;
  try {
    // This may fail, too: a group that fails takes all calls in flight with it.
    group->barrier().wait();
    at::Tensor tensor = at::ones({6}, other ? at::kInt : at::kFloat);
    group->all_reduce(tensor).wait();
    ADD_FAILURE() << "no error";
  } catch (const CommError& error) {
    EXPECT_EQ(error.fault(), Fault::mismatch) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("6 float32"));
    EXPECT_THAT(error.what(), HasSubstr("6 int32"));
  }
}

TEST_F(MpiFaults, FindsAMismatchBesideACall) {
  auto group = mpi();
  const bool other = group->rank() == 2;
  const auto start = Clock::now();
  try {
    group->barrier().wait();
    at::Tensor tensor = at::ones({6}, other ? at::kInt : at::kFloat);
    group->all_reduce(tensor).wait();
    while (Clock::now() - start < milliseconds(20'000)) {
      std::this_thread::sleep_for(milliseconds(5));
      group->barrier().wait();
    }
    ADD_FAILURE() << "no error";
  } catch (const CommError& error) {
    EXPECT_EQ(error.fault(), Fault::mismatch) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("6 float32"));
    EXPECT_THAT(error.what(), HasSubstr("6 int32"));
  }
}

TEST_F(MpiFaults, NamesARankThatDoesNotCome) {
  auto group = mpi();
  group->barrier().wait();
  if (group->rank() == 1) {
    std::this_thread::sleep_for(milliseconds(1500));
    EXPECT_THROW(group->barrier(), CommError);
    return;
  }
  try {
    at::Tensor tensor = at::ones({6}, at::kFloat);
    group->all_reduce(tensor, ReduceOp::sum, {.timeout = milliseconds(500)}).wait();
    ADD_FAILURE() << "no error";
  } catch (const CommError& error) {
    EXPECT_EQ(error.fault(), Fault::timeout) << error.what();
    EXPECT_THAT(error.ranks(), testing::ElementsAre(1)) << error.what();
  }
}

}  // namespace
}  // namespace lockstep::comm::backends

#endif
