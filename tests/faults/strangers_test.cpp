// Row 17: strangers at every listener of a job that trains.
#include <sys/resource.h>
#include <sys/socket.h>

#include <gmock/gmock.h>

#include <deque>
#include <fstream>
#include <random>
#include <set>
#include <sstream>

#include <lockstep/base/error.h>
#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>

#include "disturbed.h"
#include "tests/base/files.h"
#include "tests/store/proxy.h"

namespace lockstep::faults {
namespace {

namespace fs = std::filesystem;
using ::testing::IsEmpty;

Deadline stranger_deadline() { return Deadline::after(milliseconds(60'000)); }

// An address at which a process of the job listens: a port of this host, or an abstract name.
struct Listener {
  net::Address tcp;
  std::string unix_name;

  auto operator<=>(const Listener& other) const {
    return std::pair(tcp.text(), unix_name) <=> std::pair(other.tcp.text(), other.unix_name);
  }
  bool operator==(const Listener&) const = default;
  std::string text() const { return unix_name.empty() ? tcp.text() : "@" + unix_name; }
  net::Fd connect() const {
    return unix_name.empty() ? net::connect_tcp(tcp, stranger_deadline())
                             : net::connect_unix(unix_name, stranger_deadline());
  }
};

// The purposes of a store's client, of a launcher, and of nothing that exists.
constexpr const char* kPurposes[] = {"store stranger", "lockstep launcher", "something else"};

std::set<std::string> sockets_of(const Launched& job) {
  std::set<std::string> inodes;
  std::error_code ignored;
  for (const pid_t pid : job.alive())
    for (const auto& entry :
         fs::directory_iterator("/proc/" + std::to_string(pid) + "/fd", ignored)) {
      const std::string target = fs::read_symlink(entry.path(), ignored).string();
      if (target.starts_with("socket:[")) inodes.insert(target.substr(8, target.size() - 9));
    }
  return inodes;
}

// Finds the listeners in the kernel's list of the job's sockets, so that none is forgotten.
std::vector<Listener> listeners_of(const Launched& job) {
  const std::set<std::string> own = sockets_of(job);
  std::set<Listener> all;
  std::ifstream tcp("/proc/net/tcp");
  std::string line;
  std::getline(tcp, line);
  while (std::getline(tcp, line)) {
    std::istringstream words(line);
    std::string number, local, remote, state, queues, timer, retransmit, uid, timeout, inode;
    words >> number >> local >> remote >> state >> queues >> timer >> retransmit >> uid >>
        timeout >> inode;
    if (state != "0A" || !own.contains(inode)) continue;
    const auto host = static_cast<std::uint32_t>(std::stoul(local.substr(0, 8), nullptr, 16));
    all.insert({.tcp = {fmt::format("{}.{}.{}.{}", host & 255, host >> 8 & 255, host >> 16 & 255,
                                    host >> 24),
                        std::stoi(local.substr(9), nullptr, 16)}});
  }
  std::ifstream local("/proc/net/unix");
  std::getline(local, line);
  while (std::getline(local, line)) {
    std::istringstream words(line);
    std::string number, references, protocol, flags, type, state, inode, path;
    words >> number >> references >> protocol >> flags >> type >> state >> inode >> path;
    if (flags == "00010000" && type == "0001" && own.contains(inode) && path.starts_with('@'))
      all.insert({.unix_name = path.substr(1)});
  }
  return {all.begin(), all.end()};
}

// Reads to the end; false if the other side has not hung up in time.
bool is_hung_up_on(const net::Fd& socket, std::size_t& received) {
  std::array<std::byte, 4096> bytes;
  const Deadline deadline = stranger_deadline();
  while (net::wait_ready(socket.get(), POLLIN, deadline)) {
    const ssize_t got = ::recv(socket.get(), bytes.data(), bytes.size(), 0);
    if (got == 0 || (got < 0 && errno != EAGAIN)) return true;
    if (got > 0) received += static_cast<std::size_t>(got);
  }
  return false;
}

void send_what_it_takes(const net::Fd& socket, std::span<const std::byte> bytes) {
  ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

class Row17Strangers : public DisturbedTraining {
 protected:
  // Starts launchers that others may join, so that every kind of listener exists.
  Launched start_with_doors(const std::string& epochs) {
    const fs::path file = files_.folder() / "secret";
    lockstep::testing::write_file(file, std::string(32, 's'));
    fs::permissions(file, fs::perms::owner_read | fs::perms::owner_write);
    return start(
        {.launcher = {"--nnodes", "1:2", "--rdzv-last-call", "0", "--rdzv-endpoint",
                      "127.0.0.1:" + std::to_string(net::free_port("127.0.0.1")), "--secret-file",
                      file.string(), "--max-restarts", "1"},
         .rank = {"--pace", "200", "--pace-until", strangers_gone().string(), "--epochs", epochs}});
  }

  // The job goes on until this file exists, so that it outlasts the strangers, but not by much.
  fs::path strangers_gone() const { return files_.folder() / "strangers-gone"; }

  void try_wrong_secret(const Listener& listener) {
    for (const char* purpose : kPurposes)
      EXPECT_THROW(
          net::introduce(listener.connect(), net::Secret::random(), purpose, stranger_deadline()),
          CommError)
          << listener.text();
  }

  // Replays the words of a peer that knows the secret, without knowing it.
  void try_replay(const Listener& listener) {
    if (!listener.unix_name.empty()) return;  // its handshake is the same
    const auto secret = net::Secret::from_file((files_.folder() / "secret").string());
    for (const char* purpose : kPurposes) {
      std::vector<std::byte> recorded;
      {
        store::Proxy proxy(listener.tcp);
        const net::Fd genuine = net::connect_tcp(proxy.address(), stranger_deadline());
        try {
          net::introduce(genuine, secret, purpose, stranger_deadline());
        } catch (const CommError&) {  // connections for another purpose are turned away
        }
        recorded = proxy.recorded();
      }
      ASSERT_GT(recorded.size(), 64u) << "a greeting and a proof";
      const net::Fd thief = listener.connect();
      send_what_it_takes(thief, recorded);
      std::size_t received = 0;
      EXPECT_TRUE(is_hung_up_on(thief, received)) << listener.text();
      EXPECT_LE(received, 48u) << "more than a challenge from " << listener.text();
    }
  }

  void try_noise(const Listener& listener) {
    std::mt19937 random(5);
    for (const std::size_t size : {1, 31, 32, 33, 700, 100'000}) {
      std::vector<std::byte> noise(size);
      for (std::byte& byte : noise) byte = static_cast<std::byte>(random());
      const net::Fd socket = listener.connect();
      send_what_it_takes(socket, noise);
    }
  }

  // Some connections send nothing, some half a greeting, some nonsense; each stays open as long as
  // there is room.
  void flood(const Listener& listener, int connections) {
    constexpr std::size_t kHeld = 2000;
    std::deque<net::Fd> held;
    const std::string greeting = "LOCKSTP1";
    const std::string nonsense(100, '?');
    for (int i = 0; i < connections; ++i) {
      held.push_back(listener.connect());
      if (i % 3 == 1) send_what_it_takes(held.back(), std::as_bytes(std::span(greeting)));
      if (i % 3 == 2) send_what_it_takes(held.back(), std::as_bytes(std::span(nonsense)));
      if (held.size() > kHeld) held.pop_front();
    }
  }

  void expect_unaffected(int connections, const std::string& epochs) {
    rlimit limit{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
    limit.rlim_cur = limit.rlim_max;
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
    ASSERT_GT(limit.rlim_max, 3000u) << "this test needs a higher 'ulimit -Hn'";
    Launched job = start_with_doors(epochs);
    ASSERT_TRUE(reaches(2)) << job.error();
    const auto listeners = listeners_of(job);
    // The listeners are the launcher's, the store's, and for each rank one for other hosts and one
    // for its own.
    EXPECT_GE(listeners.size(), 6u);
    for (const Listener& listener : listeners) {
      std::printf("  %s\n", listener.text().c_str());
      try_wrong_secret(listener);
      try_replay(listener);
      try_noise(listener);
      flood(listener, connections);
      if (HasFailure()) break;
    }
    EXPECT_EQ(job.wait(milliseconds(0)), -1) << "it ended before the strangers had all been there";
    lockstep::testing::write_file(strangers_gone(), "");
    EXPECT_EQ(job.wait(milliseconds(180'000)), 0) << job.error();
    expect_nothing_left(job);
    EXPECT_THAT(launch::testing::faults_in(job.error()), IsEmpty());
    expect_undisturbed_result(2, {"--epochs", epochs});
  }
};

TEST_F(Row17Strangers, AtEveryDoorOfATraining) { expect_unaffected(500, "20"); }

class WholeRow17Strangers : public Row17Strangers {};

TEST_F(WholeRow17Strangers, TenThousandConnectionsAtEveryDoor) { expect_unaffected(10'000, "100"); }

}  // namespace
}  // namespace lockstep::faults
