// Many clients and threads at once, and a server that dies.
#include <signal.h>
#include <sys/wait.h>

#include <atomic>
#include <functional>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include <lockstep/net/socket.h>

#include "fixture.h"

namespace lockstep::store {
namespace {

using testing::HasSubstr;

using Crowd = StoreTest;

void in_threads(int count, const std::function<void(int)>& body) {
  std::vector<std::future<void>> threads;
  for (int t = 0; t < count; ++t) threads.push_back(std::async(std::launch::async, body, t));
  for (auto& thread : threads) thread.get();
}

TEST_F(Crowd, AddIsExact) {
  constexpr int kEach = 200;
  const auto shared = client();
  std::mutex mutex;
  std::set<std::int64_t> sums;
  // Half of the threads share a client, and half have their own.
  in_threads(8, [&](int t) {
    const auto own = client();
    Client& mine = t % 2 == 0 ? *shared : *own;
    for (int i = 0; i < kEach; ++i) {
      const auto sum = mine.add("n", 1, soon());
      const std::lock_guard lock(mutex);
      EXPECT_TRUE(sums.insert(sum).second) << sum << " was returned twice";
    }
  });
  EXPECT_EQ(shared->get("n", soon()), std::to_string(8 * kEach));
  EXPECT_EQ(sums.size(), 8u * kEach);
}

TEST_F(Crowd, CompareAndSetHasOneWinnerEachTime) {
  constexpr int kEach = 50;
  client()->set("n", "0 nobody", soon());
  in_threads(6, [&](int t) {
    const auto mine = client();
    for (int done = 0; done < kEach;) {
      const auto now = *mine->get("n", soon());
      // Values are unique, so a thread that gets its own back has won.
      const auto next = fmt::format("{} {}/{}", std::stoi(now) + 1, t, done);
      if (mine->compare_and_set("n", now, next, soon()) == next) ++done;
    }
  });
  EXPECT_EQ(std::stoi(*client()->get("n", soon())), 6 * kEach);
}

TEST_F(Crowd, WaitingThreadsDoNotHoldUpOthersOfTheSameClient) {
  const auto shared = client();
  std::vector<std::future<std::vector<std::string>>> waiting;
  for (int t = 0; t < 16; ++t)
    waiting.push_back(std::async(std::launch::async, [&shared, t] {
      return shared->wait({"go", "go/" + std::to_string(t)}, soon());
    }));
  for (int t = 0; t < 16; ++t) shared->set("go/" + std::to_string(t), std::to_string(t), soon());
  for (auto& one : waiting) EXPECT_EQ(one.wait_for(milliseconds(1)), std::future_status::timeout);
  shared->set("go", "now", soon());
  for (int t = 0; t < 16; ++t)
    EXPECT_EQ(waiting[static_cast<std::size_t>(t)].get()[1], std::to_string(t));
}

TEST_F(Crowd, WatchersAllArriveAtTheLastVersion) {
  constexpr int kLast = 300;
  const auto writer = client();
  std::thread writing([&] {
    for (int i = 0; i <= kLast; ++i) writer->set("n", std::to_string(i), soon());
  });
  in_threads(8, [&](int) {
    const auto mine = client();
    Versioned last;
    int value = -1;
    while (value != kLast) {
      const Versioned now = mine->watch("n", last.version, soon());
      EXPECT_GT(now.version, last.version);
      EXPECT_GT(std::stoi(now.value), value);
      value = std::stoi(now.value);
      last = now;
    }
  });
  writing.join();
}

TEST_F(Crowd, ManyClientsMeet) {
  constexpr int kRanks = 64;
  std::vector<std::string> keys;
  for (int rank = 0; rank < kRanks; ++rank) keys.push_back("rank/" + std::to_string(rank));
  in_threads(kRanks, [&](int rank) {
    const auto mine = client();
    mine->set(keys[static_cast<std::size_t>(rank)], std::to_string(rank * rank), soon());
    const auto all = mine->wait(keys, soon());
    for (int other = 0; other < kRanks; ++other)
      EXPECT_EQ(all[static_cast<std::size_t>(other)], std::to_string(other * other));
  });
}

TEST_F(Crowd, ClientsThatLeaveWhileTheyWaitAreForgotten) {
  const auto store = client();
  in_threads(8, [&](int) {
    const auto mine = client();
    EXPECT_EQ(comm_error([&] { mine->wait({"never"}, in(20)); }).first, Fault::timeout);
  });
  store->set("never", "after all", soon());
  EXPECT_EQ(store->get("never", soon()), "after all");
}

TEST_F(Crowd, TheEndOfTheServerIsNoticedAtOnce) {
  std::vector<std::unique_ptr<Client>> clients;
  std::vector<std::future<std::pair<Fault, std::string>>> waiting;
  for (int i = 0; i < 4; ++i) {
    clients.push_back(client());
    waiting.push_back(std::async(std::launch::async, [i, &mine = *clients.back()] {
      const auto deadline = Deadline::after(std::chrono::minutes(10));
      return comm_error([&] {
        if (i % 2 == 0) mine.wait({"never"}, deadline);
        if (i % 2 == 1) mine.watch("never", 0, deadline);
      });
    }));
  }
  std::this_thread::sleep_for(milliseconds(50));
  server_.reset();
  for (auto& one : waiting) {
    ASSERT_EQ(one.wait_for(std::chrono::seconds(10)), std::future_status::ready);
    const auto [fault, text] = one.get();
    EXPECT_EQ(fault, Fault::peer_lost);
    EXPECT_THAT(text, HasSubstr("'never'"));
    EXPECT_THAT(text, HasSubstr("has ended"));
  }
  // Later calls fail in the same way.
  EXPECT_EQ(comm_error([&] { clients[0]->get("a", soon()); }).first, Fault::peer_lost);
}

TEST(Death, AKilledServerIsNoticedAtOnce) {
  const auto secret = net::Secret::random();
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    const Server server({"127.0.0.1", 0}, secret);
    const int port = server.address().port;
    if (::write(ends[1], &port, sizeof(port)) != sizeof(port)) ::_exit(1);
    while (true) ::pause();
  }
  int port = 0;
  ASSERT_EQ(::read(ends[0], &port, sizeof(port)), static_cast<ssize_t>(sizeof(port)));
  ::close(ends[0]);
  ::close(ends[1]);
  Client store({"127.0.0.1", port}, secret, soon());
  store.set("a", "1", soon());
  auto waiting = std::async(std::launch::async, [&] {
    return comm_error([&] { store.wait({"a", "never"}, Deadline::after(std::chrono::hours(1))); });
  });
  EXPECT_EQ(waiting.wait_for(milliseconds(50)), std::future_status::timeout);
  ::kill(pid, SIGKILL);
  EXPECT_EQ(waiting.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  ::waitpid(pid, nullptr, 0);
  EXPECT_EQ(waiting.get().first, Fault::peer_lost);
}

TEST(Death, AServerThatDoesNotAnswerIsATimeout) {
  // The listener lets connections be made, but never sends a byte.
  const net::Fd listener = net::listen_tcp({"127.0.0.1", 0});
  const net::Address address{"127.0.0.1", net::local_port(listener)};
  const auto [fault, text] = comm_error([&] { Client(address, net::Secret::random(), in(200)); });
  EXPECT_EQ(fault, Fault::timeout);
}

TEST(Death, NobodyThereIsATimeoutThatNamesTheAddress) {
  const int port = net::local_port(net::listen_tcp({"127.0.0.1", 0}));
  const auto [fault, text] = comm_error([&] {
    Client({"127.0.0.1", port}, net::Secret::random(), in(100));
  });
  EXPECT_EQ(fault, Fault::timeout);
  EXPECT_THAT(text, HasSubstr("127.0.0.1:" + std::to_string(port)));
}

TEST(Death, AClientMayComeBeforeItsServer) {
  const auto secret = net::Secret::random();
  const int port = net::local_port(net::listen_tcp({"127.0.0.1", 0}));
  auto early = std::async(std::launch::async, [&] {
    Client({"127.0.0.1", port}, secret, soon()).set("a", "1", soon());
  });
  EXPECT_EQ(early.wait_for(milliseconds(50)), std::future_status::timeout);
  const Server server({"127.0.0.1", port}, secret);
  early.get();
  EXPECT_EQ(Client(server.address(), secret, soon()).get("a", soon()), "1");
}

}  // namespace
}  // namespace lockstep::store
