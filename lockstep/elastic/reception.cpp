#include <lockstep/elastic/reception.h>

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>

namespace lockstep::elastic {

using Json = nlohmann::json;

namespace {

// Silent strangers hold up nobody: each connection proves itself in a thread of its own, within a
// short time, and only so many at once.
constexpr int kMostAtTheDoor = 64;
constexpr milliseconds kLongestProof(3000);
constexpr milliseconds kLook(100);  // between looks at who is still there

struct Arrival {
  Channel channel;
  Introduction introduction;
};

// Connections that are still to prove themselves, and those that have. Its threads own a share of
// it, so that nobody waits for one that a silent stranger holds up.
class Door : public std::enable_shared_from_this<Door> {
 public:
  explicit Door(const net::Secret& secret) : secret_(secret) {}

  bool full() const { return busy_ >= kMostAtTheDoor; }

  void open(net::Fd socket) {
    ++busy_;
    std::thread([self = shared_from_this(), socket = std::move(socket)]() mutable {
      try {
        self->admit(std::move(socket));
      } catch (const std::exception& error) {
        log::debug("a connection was dropped: {}", error.what());
      }
      --self->busy_;
    }).detach();
  }

  std::vector<Arrival> arrivals() {
    const std::lock_guard lock(mutex_);
    return std::exchange(arrived_, {});
  }

 private:
  void admit(net::Fd socket) {
    const Deadline deadline = Deadline::after(kLongestProof);
    if (net::welcome(socket, secret_, deadline) != kLauncherPurpose) return;
    Channel channel(std::move(socket));
    const auto hello = channel.receive(deadline);
    if (!hello || hello->word != "hello") return;
    const Json json = Json::parse(hello->text);
    Introduction introduction{json.at("node_rank"), json.at("num_nodes"), json.at("num_ranks"),
                              json.at("host"), json.at("run_id")};
    const std::lock_guard lock(mutex_);
    arrived_.push_back({std::move(channel), std::move(introduction)});
  }

  const net::Secret secret_;
  std::atomic<int> busy_{0};
  std::mutex mutex_;
  std::vector<Arrival> arrived_;
};

std::set<int> claimed(const std::vector<Guest>& guests) {
  std::set<int> ranks{0};
  for (const Guest& guest : guests)
    if (guest.node_rank >= 0) ranks.insert(guest.node_rank);
  return ranks;
}

// Why a launcher cannot take part; empty where it can.
std::string objection(const Introduction& who, const Terms& terms,
                      const std::vector<Guest>& guests) {
  if (who.num_nodes != terms.num_nodes)
    return fmt::format("this job has --nnodes {}, but host {} was started with --nnodes {}",
                       terms.num_nodes, who.host, who.num_nodes);
  if (who.run_id != terms.run_id)
    return fmt::format("this job has --rdzv-id '{}', but host {} was started with '{}'",
                       terms.run_id, who.host, who.run_id);
  if (static_cast<int>(guests.size()) >= terms.num_nodes - 1)
    return fmt::format("all {} nodes of this job have come already, without host {}",
                       terms.num_nodes, who.host);
  if (who.num_ranks < 1)
    return fmt::format("host {} wants to run {} ranks", who.host, who.num_ranks);
  if (who.node_rank >= terms.num_nodes)
    return fmt::format("--node-rank {} of host {} is not below --nnodes {}", who.node_rank,
                       who.host, terms.num_nodes);
  if (who.node_rank == 0)
    return fmt::format("host {} was started with --node-rank 0, which this host is", who.host);
  for (const Guest& guest : guests)
    if (who.node_rank > 0 && guest.node_rank == who.node_rank)
      return fmt::format("hosts {} and {} were both started with --node-rank {}", guest.host,
                         who.host, who.node_rank);
  return "";
}

void drop_those_gone(std::vector<Guest>& guests) {
  std::erase_if(guests, [](Guest& guest) {
    guest.channel.receive();
    if (!guest.channel.open()) log::warn("the launcher of host {} went away again", guest.host);
    return !guest.channel.open();
  });
}

}  // namespace

std::string Introduction::encode() const {
  const Json json = {{"node_rank", node_rank},
                     {"num_nodes", num_nodes},
                     {"num_ranks", num_ranks},
                     {"host", host},
                     {"run_id", run_id}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::vector<Guest> receive_guests(const net::Fd& listener, const net::Secret& secret,
                                  const Terms& terms, const Deadline& deadline) {
  std::vector<Guest> guests;
  const auto door = std::make_shared<Door>(secret);
  Clock::time_point next_look = Clock::now();
  while (static_cast<int>(guests.size()) < terms.num_nodes - 1 && !deadline.passed()) {
    // Proofs are short and the wait is not hot: a look every few milliseconds is enough.
    pollfd ready{door->full() ? -1 : listener.get(), POLLIN, 0};
    ::poll(&ready, 1, deadline.poll_timeout(milliseconds(5)));
    if (ready.revents != 0) {
      net::Fd socket = net::accept(listener);
      if (socket) {
        door->open(std::move(socket));
      } else if (net::out_of_descriptors(errno)) {
        std::this_thread::sleep_for(std::min<Clock::duration>(kLook, deadline.remaining()));
      }
    }
    if (Clock::now() >= next_look) {
      drop_those_gone(guests);
      next_look = Clock::now() + kLook;
    }
    for (Arrival& arrival : door->arrivals()) {
      const std::string reason = objection(arrival.introduction, terms, guests);
      if (!reason.empty()) {
        log::warn("refused a launcher: {}", reason);
        arrival.channel.send("refused", reason);
      } else {
        guests.push_back({std::move(arrival.channel), arrival.introduction.node_rank,
                          arrival.introduction.num_ranks, arrival.introduction.host});
      }
    }
  }
  return guests;
}

std::string missing_nodes(const std::vector<Guest>& guests, int num_nodes) {
  const std::size_t missing = static_cast<std::size_t>(num_nodes) - 1 - guests.size();
  if (missing == 0) return "";
  const std::set<int> taken = claimed(guests);
  std::vector<int> open;
  for (int node = 1; node < num_nodes; ++node)
    if (!taken.contains(node)) open.push_back(node);
  // Guests that claimed no rank could take any of those that are open.
  if (open.size() == missing) return "node " + list_ranks(open);
  return fmt::format("{} of the node {}", missing, list_ranks(open));
}

void assign_node_ranks(std::vector<Guest>& guests, int num_nodes) {
  std::set<int> taken = claimed(guests);
  int next = 1;
  for (Guest& guest : guests) {
    if (guest.node_rank >= 0) continue;
    while (taken.contains(next)) ++next;
    LOCKSTEP_CHECK(next < num_nodes);
    guest.node_rank = next;
    taken.insert(next);
  }
}

}  // namespace lockstep::elastic
