// Connections break: calls are repeated, and none is applied twice.
#include <future>

#include "fixture.h"
#include "proxy.h"

namespace lockstep::store {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class Repeat : public StoreTest {
 protected:
  Proxy proxy_{server_->address()};
  Client far_{proxy_.address(), secret_, soon()};  // reaches the server through the proxy
  std::unique_ptr<Client> near_ = client();
};

TEST_F(Repeat, AddIsAppliedOnce) {
  for (int i = 1; i <= 10; ++i) {
    proxy_.swallow_replies(1 + i % 2);
    EXPECT_EQ(far_.add("n", 1, soon()), i);
    EXPECT_EQ(proxy_.replies_to_swallow(), 0);
  }
  EXPECT_EQ(near_->get("n", soon()), "10");
}

// Versions count the changes of the whole store, so they show how often a call was applied.
TEST_F(Repeat, CompareAndSetIsAppliedOnce) {
  near_->set("a", "1", soon());
  const auto version = near_->watch("a", 0, soon()).version;
  proxy_.swallow_replies(2);
  EXPECT_EQ(far_.compare_and_set("a", "1", "1", soon()), "1");
  EXPECT_EQ(near_->watch("a", 0, soon()).version, version + 1);
  proxy_.swallow_replies(1);
  EXPECT_EQ(far_.compare_and_set("a", "not this", "other", soon()), "1");
  EXPECT_EQ(near_->watch("a", 0, soon()).version, version + 1);
}

TEST_F(Repeat, SetIsAppliedOnce) {
  near_->set("a", "1", soon());
  const auto version = near_->watch("a", 0, soon()).version;
  proxy_.swallow_replies(2);
  far_.set("a", "2", soon());
  EXPECT_EQ(near_->watch("a", 0, soon()).version, version + 1);
}

TEST_F(Repeat, RemoveKnowsThatTheKeyExisted) {
  near_->set("a", "1", soon());
  proxy_.swallow_replies(1);
  EXPECT_TRUE(far_.remove("a", soon()));
  EXPECT_FALSE(far_.remove("a", soon()));
}

TEST_F(Repeat, WaitsGoOnOverANewConnection) {
  auto waiting = std::async(std::launch::async, [&] { return far_.wait({"a"}, soon()); });
  auto watching = std::async(std::launch::async, [&] { return far_.watch("a", 0, soon()); });
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(waiting.wait_for(milliseconds(50)), std::future_status::timeout);
    proxy_.cut_all();
  }
  EXPECT_EQ(waiting.wait_for(milliseconds(50)), std::future_status::timeout);
  near_->set("a", "1", soon());
  EXPECT_THAT(waiting.get(), ElementsAre("1"));
  EXPECT_EQ(watching.get().value, "1");
}

TEST_F(Repeat, IdleConnectionsThatBrokeAreNoMatter) {
  far_.set("a", "1", soon());
  proxy_.cut_all();
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_EQ(far_.get("a", soon()), "1");
}

TEST_F(Repeat, ConcurrentAddsOverABadNetworkAreExact) {
  constexpr int kThreads = 4;
  constexpr int kEach = 30;
  std::vector<std::future<void>> adders;
  for (int t = 0; t < kThreads; ++t)
    adders.push_back(std::async(std::launch::async, [&] {
      for (int i = 0; i < kEach; ++i) far_.add("n", 1, soon());
    }));
  const auto all_done = [&] {
    for (auto& adder : adders)
      if (adder.wait_for(milliseconds(3)) != std::future_status::ready) return false;
    return true;
  };
  for (int cuts = 0; !all_done(); ++cuts) {
    // The cutting stops at some point, because each add has to succeed in the end.
    if (cuts < 40) proxy_.swallow_replies(2);
  }
  for (auto& adder : adders) adder.get();
  EXPECT_EQ(near_->get("n", soon()), std::to_string(kThreads * kEach));
}

TEST_F(Repeat, AnotherServerIsNotTakenForTheFirst) {
  far_.set("a", "1", soon());
  const Server other({"127.0.0.1", 0}, secret_);
  proxy_.redirect(other.address());
  proxy_.cut_all();
  std::this_thread::sleep_for(milliseconds(50));
  const auto [fault, text] = comm_error([&] { far_.set("a", "2", soon()); });
  EXPECT_EQ(fault, Fault::peer_lost);
  EXPECT_THAT(text, HasSubstr("Another server"));
  EXPECT_EQ(Client(other.address(), secret_, soon()).get("a", soon()), std::nullopt);
}

}  // namespace
}  // namespace lockstep::store
