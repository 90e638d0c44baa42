// A group leaves nothing behind, and strangers that connect while it works change nothing.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include <gtest/gtest.h>

#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>

#include "../../base/shared_memory_names.h"
#include "collective.h"

namespace lockstep::comm::faults {
namespace {

struct Holdings {
  int descriptors = 0;
  int shared_mappings = 0;
  int threads = 0;
  int listeners = 0;

  bool exceeds(const Holdings& other) const {
    return descriptors > other.descriptors || shared_mappings > other.shared_mappings ||
           threads > other.threads || listeners > other.listeners;
  }
  std::string text() const {
    return fmt::format("{} descriptors, {} shared mappings, {} threads, {} listeners", descriptors,
                       shared_mappings, threads, listeners);
  }
};

// The descriptors, mappings and threads that this process holds at the moment.
Holdings holdings() {
  Holdings now;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++now.descriptors;
    const int fd = std::atoi(entry.path().filename().c_str());
    int listens = 0;
    socklen_t size = sizeof(listens);
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens != 0)
      ++now.listeners;
  }
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", ignored)) {
    (void)entry;
    ++now.threads;
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find("memfd:") != std::string::npos) ++now.shared_mappings;
  return now;
}

// The same, taken once it is no more than before: the system lists a thread for a moment after its
// end.
Holdings holdings_after(const Holdings& before) {
  const Deadline deadline = Deadline::after(milliseconds(5'000));
  Holdings now = holdings();
  while (now.exceeds(before) && !deadline.passed()) {
    std::this_thread::yield();
    now = holdings();
  }
  return now;
}

class Remains : public ::testing::TestWithParam<Media> {};

// Makes fifty groups with buffers of their own, one after the other, in processes that live on;
// some groups end by a fault.
TEST_P(Remains, NothingAfterFiftyGroups) {
  constexpr int kRanks = 3;
  const Media media = GetParam();
  const auto files = lockstep::testing::shared_memory_names();
  Job job(kRanks, {.media = media}, [media](Rank& rank) {
    // The endpoints of the job itself pass on the addresses of those under test.
    const auto one_life = [&](int life, int groups) {
      const auto endpoint = std::make_shared<Endpoint>("127.0.0.1", rank.endpoint().secret());
      std::string text = endpoint->address().encode();
      text.resize(4096, '\n');
      std::vector<std::byte> all(kRanks * text.size());
      std::vector<Bytes> outputs;
      for (std::size_t peer = 0; peer < kRanks; ++peer)
        outputs.push_back(Bytes(all).subspan(peer * text.size(), text.size()));
      rank.begin({.operation = Operation::all_gather});
      all_gather(rank.transport(), Algorithm::direct, outputs, std::as_bytes(std::span(text)));
      std::vector<EndpointAddress> addresses;
      for (const Bytes& one : outputs)
        addresses.push_back(EndpointAddress::decode(
            {reinterpret_cast<const char*>(one.data()), text.find("\n\n\n\n")}));
      for (int group = 0; group < groups; ++group) {
        const auto transport = connect_group(endpoint,
                                             {.group_id = fmt::format("life-{}-{}", life, group),
                                              .group_name = "short-lived",
                                              .rank = rank.rank(),
                                              .addresses = addresses},
                                             media, Deadline::after(milliseconds(20'000)));
        const auto memory = transport->heap().allocate(1 << 16);
        std::fill_n(memory.get(), 1 << 16, std::byte{1});
        // Every fifth group ends by a mismatch.
        const bool odd_one_out = group % 5 == 4 && rank.rank() == 1;
        try {
          transport->begin({.sequence = odd_one_out ? 2u : 1u},
                           Deadline::after(milliseconds(20'000)));
          all_reduce(*transport, Algorithm::direct, {DType::uint8, ReduceOp::max},
                     Bytes(memory.get(), 1 << 16));
        } catch (const CommError& error) {
          LOCKSTEP_CHECK(group % 5 == 4 && error.fault() == Fault::mismatch, "{}", error.what());
          transport->tell(Notice::from(error, rank.rank()));
        }
      }
    };
    one_life(0, 1);  // allocates whatever the first group sets up for good
    rank.begin({.operation = Operation::barrier});
    barrier(rank.transport());
    const Holdings before = holdings();
    one_life(1, 50);
    rank.begin({.operation = Operation::barrier});
    barrier(rank.transport());
    const Holdings after = holdings_after(before);
    rank.say(!after.exceeds(before)
                 ? "clean"
                 : fmt::format("before: {}; after: {}", before.text(), after.text()));
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    const Outcome outcome = job.outcome(rank);
    EXPECT_TRUE(outcome.finished) << outcome.text;
    EXPECT_NE(outcome.said.find("clean\n"), std::string::npos) << outcome.said;
  }
  EXPECT_EQ(lockstep::testing::shared_memory_names(), files);
}

// Checks a buffer that was allocated for the group and then freed.
TEST_P(Remains, NoMappingOfABufferThatIsGone) {
  const Media media = GetParam();
  Job job(2, {.media = media}, [](Rank& rank) {
    const Holdings before = holdings();
    {
      const auto memory = rank.transport().heap().allocate(SharedHeap::kSegmentBytes + 1);
      rank.begin({.operation = Operation::barrier});
      barrier(rank.transport());
    }
    rank.begin({.operation = Operation::barrier});
    barrier(rank.transport());
    // The peer unmaps our buffer at its next call.
    rank.begin({.operation = Operation::barrier});
    barrier(rank.transport());
    const Holdings after = holdings_after(before);
    rank.say(!after.exceeds(before)
                 ? "clean"
                 : fmt::format("before: {}; after: {}", before.text(), after.text()));
  });
  for (int rank = 0; rank < 2; ++rank) {
    const Outcome outcome = job.outcome(rank);
    EXPECT_NE(outcome.said.find("clean\n"), std::string::npos) << outcome.said << outcome.text;
  }
}

// Strangers send garbage, silence, half a greeting or the wrong secret to every listener while
// calls run.
TEST_P(Remains, StrangersChangeNothing) {
  constexpr int kRanks = 3;
  Job job(kRanks, {.media = GetParam()}, [](Rank& rank) {
    std::uint32_t all = 0;
    rank.say("ready");
    const auto end = Clock::now() + milliseconds(1500);
    for (int round = 0;; ++round) {
      // Rank 0 decides when to stop.
      std::vector<std::byte> stop(1, std::byte{Clock::now() > end});
      rank.begin({.root = 0, .operation = Operation::broadcast});
      broadcast(rank.transport(), Algorithm::direct, stop, 0);
      if (stop.front() != std::byte{0}) break;
      all ^= run(rank, {Operation::all_reduce, Algorithm::direct, 50'000}, round,
                 milliseconds(10'000));
    }
    rank.say(fmt::format("result {}", all));
  });
  for (int rank = 0; rank < kRanks; ++rank) ASSERT_TRUE(job.says(rank, "ready"));
  const Deadline deadline = Deadline::after(milliseconds(30'000));
  std::vector<net::Fd> kept;
  const net::Secret wrong = net::Secret::random();
  for (int round = 0; round < 30; ++round) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const EndpointAddress& door = job.address(rank);
      for (const bool over_tcp : {true, false}) {
        const auto connect = [&] {
          return over_tcp ? net::connect_tcp(door.tcp, deadline)
                          : net::connect_unix(door.unix_name, deadline);
        };
        kept.push_back(connect());  // silence
        net::Fd garbage = connect();
        const std::string noise(700, static_cast<char>(round * 7 + 1));
        ::send(garbage.get(), noise.data(), noise.size(), MSG_NOSIGNAL);
        kept.push_back(std::move(garbage));
        EXPECT_THROW(net::introduce(connect(), wrong, "group 1 job-1", deadline), CommError);
      }
    }
  }
  std::string first;
  for (int rank = 0; rank < kRanks; ++rank) {
    const Outcome outcome = job.outcome(rank);
    ASSERT_TRUE(outcome.finished) << outcome.text;
    const std::string result = outcome.said.substr(outcome.said.find("result"));
    if (rank == 0) first = result;
    EXPECT_EQ(result, first);
  }
}

INSTANTIATE_TEST_SUITE_P(Media, Remains, ::testing::Values(Media::shared_memory, Media::tcp),
                         [](const auto& info) { return info.param == Media::tcp ? "tcp" : "shm"; });

}  // namespace
}  // namespace lockstep::comm::faults
