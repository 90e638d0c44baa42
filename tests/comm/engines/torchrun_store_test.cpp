// Our store over c10d's, as a program under torchrun has it.
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/world/torchrun_store.h>

#include "ranks.h"

namespace lockstep::comm {
namespace {

using testing::HasSubstr;

Deadline soon() { return Deadline::after(milliseconds(5000)); }

class TorchrunStore : public testing::Test {
 protected:
  // A port that was free a moment ago.
  static int free_port() {
    store::Server probe({.host = "127.0.0.1", .port = 0}, net::Secret::random());
    return probe.address().port;
  }

  const int port_ = free_port();
  std::shared_ptr<store::Store> host_ =
      make_torchrun_store({.host = "127.0.0.1", .port = port_, .hosted_here = true}, soon());
  std::shared_ptr<store::Store> guest_ =
      make_torchrun_store({.host = "127.0.0.1", .port = port_}, soon());
};

TEST_F(TorchrunStore, SetsAndGets) {
  EXPECT_EQ(guest_->get("a", soon()), std::nullopt);
  host_->set("a", "", soon());
  EXPECT_EQ(guest_->get("a", soon()), "");
  host_->set("a", std::string("1:\0x", 4), soon());
  EXPECT_EQ(guest_->get("a", soon()), std::string("1:\0x", 4));
  EXPECT_TRUE(guest_->remove("a", soon()));
  EXPECT_FALSE(guest_->remove("a", soon()));
  EXPECT_EQ(host_->get("a", soon()), std::nullopt);
}

TEST_F(TorchrunStore, ComparesAndSets) {
  EXPECT_EQ(host_->compare_and_set("k", "x", "y", soon()), "");
  EXPECT_EQ(host_->get("k", soon()), std::nullopt);
  EXPECT_EQ(host_->compare_and_set("k", std::nullopt, "", soon()), "");
  EXPECT_EQ(guest_->compare_and_set("k", std::nullopt, "b", soon()), "");
  EXPECT_EQ(guest_->get("k", soon()), "");
  EXPECT_EQ(guest_->compare_and_set("k", "", "b", soon()), "b");
  EXPECT_EQ(host_->compare_and_set("k", "", "c", soon()), "b");
}

TEST_F(TorchrunStore, CountsForSeveralAtOnce) {
  backends::run_ranks(4, [&](int rank) {
    for (int i = 0; i < 25; ++i) (rank % 2 == 0 ? host_ : guest_)->add("n", 2, soon());
  });
  EXPECT_EQ(host_->add("n", -200, soon()), 0);
  host_->set("text", "word", soon());
  EXPECT_THROW(host_->add("text", 1, soon()), UsageError);
}

TEST_F(TorchrunStore, WaitsForKeys) {
  std::thread setter([&] {
    std::this_thread::sleep_for(milliseconds(50));
    host_->set("late", "1", soon());
  });
  host_->set("early", "0", soon());
  EXPECT_THAT(guest_->wait({"early", "late"}, soon()), testing::ElementsAre("0", "1"));
  setter.join();
  try {
    guest_->wait({"early", "never", "nor this"}, Deadline::after(milliseconds(100)));
    ADD_FAILURE() << "no error";
  } catch (const CommError& error) {
    EXPECT_EQ(error.fault(), Fault::timeout);
    EXPECT_THAT(error.what(), HasSubstr("never, nor this"));
  }
}

TEST_F(TorchrunStore, WatchesAndVersionsGrow) {
  host_->set("w", "1", soon());
  const auto first = guest_->watch("w", 0, soon());
  EXPECT_EQ(first.value, "1");
  std::thread setter([&] {
    std::this_thread::sleep_for(milliseconds(50));
    host_->set("w", "1", soon());
  });
  const auto second = guest_->watch("w", first.version, soon());
  setter.join();
  EXPECT_GT(second.version, first.version);
  // A key that is made again does not start over.
  host_->remove("w", soon());
  host_->set("w", "2", soon());
  EXPECT_GT(guest_->watch("w", second.version, soon()).version, second.version);
  EXPECT_THROW(guest_->watch("w2", 0, Deadline::after(milliseconds(50))), CommError);
}

TEST(TorchrunStoreOptions, AreTheEnvironments) {
  LaunchEnvironment launch;
  EXPECT_THROW(torchrun_store_options(launch), UsageError);
  launch.master_addr = "node1";
  launch.master_port = 29500;
  launch.rank = 0;
  EXPECT_TRUE(torchrun_store_options(launch).hosted_here);
  launch.rank = 1;
  EXPECT_FALSE(torchrun_store_options(launch).hosted_here);
  ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  launch.rank = 0;
  EXPECT_FALSE(torchrun_store_options(launch).hosted_here);
  ::unsetenv("TORCHELASTIC_USE_AGENT_STORE");
}

TEST(TorchrunStoreOptions, NobodyThere) {
  try {
    make_torchrun_store({.host = "127.0.0.1", .port = 1}, Deadline::after(milliseconds(500)));
    ADD_FAILURE() << "no error";
  } catch (const CommError& error) {
    EXPECT_EQ(error.fault(), Fault::timeout);
    EXPECT_THAT(error.what(), HasSubstr("127.0.0.1:1"));
  }
}

}  // namespace
}  // namespace lockstep::comm
