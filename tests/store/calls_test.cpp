// The meaning of each call, with one client at a time.
#include <future>
#include <limits>
#include <thread>

#include "fixture.h"

namespace lockstep::store {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

class Calls : public StoreTest {
 protected:
  std::unique_ptr<Client> store_ = client();
};

TEST_F(Calls, SetThenGet) {
  EXPECT_EQ(store_->get("a", soon()), std::nullopt);
  store_->set("a", "one", soon());
  EXPECT_EQ(store_->get("a", soon()), "one");
  store_->set("a", "", soon());
  EXPECT_EQ(store_->get("a", soon()), "");
}

TEST_F(Calls, KeysAndValuesAreBytes) {
  std::string every(256, '\0');
  for (int i = 0; i < 256; ++i) every[static_cast<std::size_t>(i)] = static_cast<char>(i);
  store_->set(every, every, soon());
  EXPECT_EQ(store_->get(every, soon()), every);
  EXPECT_EQ(store_->get(every.substr(0, 255), soon()), std::nullopt);
  store_->set("", "empty key", soon());
  EXPECT_EQ(store_->get("", soon()), "empty key");
}

TEST_F(Calls, ClientsShareTheStore) {
  client()->set("a", "left by a client that is gone", soon());
  EXPECT_EQ(client()->get("a", soon()), "left by a client that is gone");
}

TEST_F(Calls, LimitsHoldExactly) {
  const std::string key(kLongestKey, 'k');
  const std::string value(kLongestValue, 'v');
  store_->set(key, value, soon());
  EXPECT_EQ(store_->get(key, soon()), value);
  EXPECT_EQ(store_->compare_and_set(key, value, value, soon()), value);

  EXPECT_THAT(usage_error([&] { store_->set(key + "k", "", soon()); }), HasSubstr("1025 bytes"));
  EXPECT_THAT(usage_error([&] { store_->get(key + "k", soon()); }), HasSubstr("limit of 1024"));
  EXPECT_THAT(usage_error([&] { store_->wait({"a", key + "k"}, soon()); }), HasSubstr("1025"));
  EXPECT_THAT(usage_error([&] { store_->watch(key + "k", 0, soon()); }), HasSubstr("1025"));
  EXPECT_THAT(usage_error([&] { store_->set("a", value + "v", soon()); }),
              HasSubstr("limit of 1048576"));
  EXPECT_THAT(usage_error([&] { store_->compare_and_set("a", value + "v", "", soon()); }),
              HasSubstr("1048577 bytes"));
  EXPECT_THAT(
      usage_error([&] { store_->wait(std::vector<std::string>(kMostKeysInWait + 1), soon()); }),
      HasSubstr("at most 65536 keys"));
  EXPECT_THAT(usage_error([&] { store_->wait(std::vector<std::string>(5000, key), soon()); }),
              HasSubstr("bytes together"));
  // The connection still works.
  EXPECT_EQ(store_->get("a", soon()), std::nullopt);
}

TEST_F(Calls, WaitReturnsAtOnceWhereAllExist) {
  store_->set("a", "1", soon());
  store_->set("b", "2", soon());
  EXPECT_THAT(store_->wait({"b", "a", "b"}, soon()), ElementsAre("2", "1", "2"));
  EXPECT_THAT(store_->wait({"a"}, in(0)), ElementsAre("1"));
  EXPECT_THAT(store_->wait({}, soon()), ElementsAre());
}

TEST_F(Calls, WaitEndsWithTheLastKey) {
  auto waiting = std::async(std::launch::async, [&] {
    return client()->wait({"a", "b", "c"}, soon());
  });
  for (const char* key : {"c", "a"}) {
    store_->set(key, key, soon());
    EXPECT_EQ(waiting.wait_for(milliseconds(50)), std::future_status::timeout);
  }
  store_->set("b", "b", soon());
  EXPECT_THAT(waiting.get(), ElementsAre("a", "b", "c"));
}

TEST_F(Calls, WaitWantsAllKeysAtTheSameTime) {
  store_->set("a", "1", soon());
  auto waiting = std::async(std::launch::async, [&] { return client()->wait({"a", "b"}, soon()); });
  EXPECT_EQ(waiting.wait_for(milliseconds(50)), std::future_status::timeout);
  EXPECT_TRUE(store_->remove("a", soon()));
  store_->set("b", "2", soon());
  EXPECT_EQ(waiting.wait_for(milliseconds(50)), std::future_status::timeout);
  store_->set("a", "3", soon());
  EXPECT_THAT(waiting.get(), ElementsAre("3", "2"));
}

TEST_F(Calls, WaitListsWhatIsMissingAtItsDeadline) {
  store_->set("rank/1", "here", soon());
  const auto start = Clock::now();
  const auto [fault, text] = comm_error([&] {
    store_->wait({"rank/0", "rank/1", "rank/2"}, in(200));
  });
  EXPECT_GE(Clock::now() - start, milliseconds(200));
  EXPECT_EQ(fault, Fault::timeout);
  EXPECT_THAT(text, HasSubstr("store wait of 3 keys"));
  EXPECT_THAT(text, HasSubstr("Missing after 0.2 s: 'rank/0', 'rank/2'."));
  EXPECT_THAT(text, Not(HasSubstr("'rank/1'")));
  EXPECT_EQ(store_->get("rank/1", soon()), "here");
}

TEST_F(Calls, LongListsOfMissingKeysAreCut) {
  std::vector<std::string> keys;
  for (int i = 0; i < 1000; ++i) keys.push_back("rank/" + std::to_string(i));
  const auto [fault, text] = comm_error([&] { store_->wait(keys, in(10)); });
  EXPECT_EQ(fault, Fault::timeout);
  EXPECT_THAT(text, HasSubstr("'rank/15' and 984 more"));
  EXPECT_THAT(text, Not(HasSubstr("'rank/16'")));
}

TEST_F(Calls, WaitForManyKeys) {
  std::vector<std::string> keys;
  for (int i = 0; i < 3000; ++i) {
    keys.push_back("k" + std::to_string(i));
    store_->set(keys.back(), std::to_string(i), soon());
  }
  const auto values = store_->wait(keys, soon());
  ASSERT_EQ(values.size(), keys.size());
  for (int i = 0; i < 3000; ++i) EXPECT_EQ(values[static_cast<std::size_t>(i)], std::to_string(i));
}

TEST_F(Calls, ValuesTooLargeForOneReplyAreRefused) {
  store_->set("big", std::string(kLongestValue, 'x'), soon());
  EXPECT_EQ(store_->wait(std::vector<std::string>(48, "big"), soon()).size(), 48u);
  EXPECT_THAT(usage_error([&] { store_->wait(std::vector<std::string>(49, "big"), soon()); }),
              HasSubstr("wait in several calls"));
}

TEST_F(Calls, CompareAndSet) {
  EXPECT_EQ(store_->compare_and_set("a", "x", "1", soon()), "");
  EXPECT_EQ(store_->get("a", soon()), std::nullopt);
  EXPECT_EQ(store_->compare_and_set("a", std::nullopt, "1", soon()), "1");
  EXPECT_EQ(store_->compare_and_set("a", std::nullopt, "2", soon()), "1");
  EXPECT_EQ(store_->compare_and_set("a", "0", "2", soon()), "1");
  EXPECT_EQ(store_->compare_and_set("a", "1", "2", soon()), "2");
  EXPECT_EQ(store_->get("a", soon()), "2");
  store_->set("empty", "", soon());
  EXPECT_EQ(store_->compare_and_set("empty", std::nullopt, "no", soon()), "");
  EXPECT_EQ(store_->compare_and_set("empty", "", "yes", soon()), "yes");
}

TEST_F(Calls, Add) {
  EXPECT_EQ(store_->add("n", 0, soon()), 0);
  EXPECT_EQ(store_->add("n", 5, soon()), 5);
  EXPECT_EQ(store_->add("n", -7, soon()), -2);
  EXPECT_EQ(store_->get("n", soon()), "-2");
  store_->set("n", "40", soon());
  EXPECT_EQ(store_->add("n", 2, soon()), 42);
}

TEST_F(Calls, AddRefusesWhatIsNoCounter) {
  store_->set("n", "12 apples", soon());
  EXPECT_THAT(usage_error([&] { store_->add("n", 1, soon()); }), HasSubstr("'12 apples'"));
  EXPECT_EQ(store_->get("n", soon()), "12 apples");
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(store_->add("m", kMost, soon()), kMost);
  EXPECT_THAT(usage_error([&] { store_->add("m", 1, soon()); }), HasSubstr("64-bit"));
  EXPECT_EQ(store_->get("m", soon()), std::to_string(kMost));
  EXPECT_EQ(store_->add("m", -1, soon()), kMost - 1);
}

TEST_F(Calls, Remove) {
  EXPECT_FALSE(store_->remove("a", soon()));
  store_->set("a", "1", soon());
  EXPECT_TRUE(store_->remove("a", soon()));
  EXPECT_FALSE(store_->remove("a", soon()));
  EXPECT_EQ(store_->get("a", soon()), std::nullopt);
}

TEST_F(Calls, WatchSeesEachChange) {
  store_->set("a", "1", soon());
  const Versioned first = store_->watch("a", 0, soon());
  EXPECT_EQ(first.value, "1");
  EXPECT_GT(first.version, 0u);
  // Every change counts, also one to the same value.
  Versioned last = first;
  const auto step = [&](const std::string& value) {
    const Versioned now = store_->watch("a", last.version, soon());
    EXPECT_EQ(now.value, value);
    EXPECT_GT(now.version, last.version);
    last = now;
  };
  store_->set("a", "1", soon());
  step("1");
  store_->compare_and_set("a", "1", "2", soon());
  step("2");
  store_->add("a", 3, soon());
  step("5");
}

TEST_F(Calls, WatchSeesTheLatest) {
  const auto seen = [&] {
    store_->set("a", "0", soon());
    return store_->watch("a", 0, soon()).version;
  }();
  for (int i = 1; i <= 10; ++i) store_->set("a", std::to_string(i), soon());
  EXPECT_EQ(store_->watch("a", seen, soon()).value, "10");
}

TEST_F(Calls, WatchBlocksUntilThereIsSomethingNew) {
  auto first = std::async(std::launch::async, [&] { return client()->watch("a", 0, soon()); });
  EXPECT_EQ(first.wait_for(milliseconds(50)), std::future_status::timeout);
  store_->set("b", "another key", soon());
  EXPECT_EQ(first.wait_for(milliseconds(50)), std::future_status::timeout);
  store_->set("a", "1", soon());
  const Versioned one = first.get();
  EXPECT_EQ(one.value, "1");

  auto second =
      std::async(std::launch::async, [&] { return client()->watch("a", one.version, soon()); });
  EXPECT_EQ(second.wait_for(milliseconds(50)), std::future_status::timeout);
  // A key that is removed and set again has a newer version.
  store_->remove("a", soon());
  EXPECT_EQ(second.wait_for(milliseconds(50)), std::future_status::timeout);
  store_->set("a", "2", soon());
  const Versioned two = second.get();
  EXPECT_EQ(two.value, "2");
  EXPECT_GT(two.version, one.version);
}

TEST_F(Calls, WatchTimesOut) {
  store_->set("a", "1", soon());
  const auto seen = store_->watch("a", 0, soon()).version;
  const auto [fault, text] = comm_error([&] { store_->watch("a", seen, in(100)); });
  EXPECT_EQ(fault, Fault::timeout);
  EXPECT_THAT(text, HasSubstr("store watch 'a'"));
  EXPECT_THAT(text, HasSubstr("version " + std::to_string(seen)));
}

TEST_F(Calls, NeverIsALegalDeadline) {
  auto waiting = std::async(std::launch::async, [&] {
    return client()->wait({"a"}, Deadline::after(milliseconds::max()));
  });
  EXPECT_EQ(waiting.wait_for(milliseconds(50)), std::future_status::timeout);
  store_->set("a", "1", Deadline::after(milliseconds::max()));
  EXPECT_THAT(waiting.get(), ElementsAre("1"));
}

TEST(Capacity, AFullStoreSaysSoAndLivesOn) {
  const auto secret = net::Secret::random();
  const Server server({"127.0.0.1", 0}, secret, 10000);
  Client store(server.address(), secret, soon());
  store.set("a", std::string(9000, 'x'), soon());
  EXPECT_THAT(usage_error([&] { store.set("b", std::string(2000, 'y'), soon()); }),
              HasSubstr("the store is full"));
  EXPECT_EQ(store.get("b", soon()), std::nullopt);
  EXPECT_THAT(usage_error([&] { store.set("a", std::string(11000, 'x'), soon()); }),
              HasSubstr("the store is full"));
  EXPECT_EQ(store.get("a", soon())->size(), 9000u);
  // Shrinking and removing values makes room.
  store.set("a", "small", soon());
  store.set("b", std::string(9000, 'y'), soon());
  EXPECT_TRUE(store.remove("b", soon()));
  store.set("c", std::string(9000, 'z'), soon());
  EXPECT_EQ(store.get("a", soon()), "small");
}

}  // namespace
}  // namespace lockstep::store
