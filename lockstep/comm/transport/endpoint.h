// Where a process can be reached by the others of its job, for all groups it is in.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/transport/notice.h>
#include <lockstep/net/address.h>
#include <lockstep/net/fd.h>
#include <lockstep/net/secret.h>

namespace lockstep::comm {

// What a process tells the others about itself.
struct EndpointAddress {
  std::string host;  // identifies the host, its boot and its network: equal means shared memory
  std::string unix_name;  // of its abstract Unix socket
  net::Address tcp;
  std::vector<int> cores;  // that the process may run on

  std::string encode() const;
  static EndpointAddress decode(const std::string& text);  // CommError (corrupted)
};

// Connections that have arrived for one group, waiting to be picked up. Thread-safe.
class Mailbox {
 public:
  Mailbox();

  // The newest connection of a rank; waits until the deadline, then returns an empty Fd.
  net::Fd take(int from, Deadline deadline);

  // Readable while something waits.
  int event() const { return event_.get(); }

  // How far this rank has got in the group: the number of its newest call, for others who ask.
  void set_sequence(std::uint64_t sequence) {
    sequence_.store(sequence, std::memory_order_relaxed);
  }
  std::uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }

 private:
  friend class Endpoint;
  void put(int from, net::Fd connection);

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<int, net::Fd> waiting_;
  net::Fd event_;
  std::atomic<std::uint64_t> sequence_{0};
};

// What a connection runs over.
enum class Medium : std::uint8_t { shared_memory, tcp };

// Listens on a Unix socket and, on the address it is told, on TCP; a thread greets who connects and
// sorts them by group. Whoever does not prove within two seconds that it knows the secret is
// dropped. Owned by the job; outlives every group.
class Endpoint {
 public:
  // `bind_host` is the TCP address to listen on; port 0 of it.
  Endpoint(const std::string& bind_host, net::Secret secret);
  ~Endpoint();

  const EndpointAddress& address() const { return address_; }
  const net::Secret& secret() const { return secret_; }

  // Opens a group's mailbox; it stays open while the pointer lives.
  std::shared_ptr<Mailbox> open(const std::string& group_id);

  // Connects to another endpoint's mailbox for a group, as rank `from` of it. CommError.
  net::Fd connect(const EndpointAddress& to, const std::string& group_id, int from, Medium medium,
                  Deadline deadline) const;
  // Asks another endpoint, over a fresh TCP connection to it, how a group is doing there.
  struct Answer {
    bool open = false;
    std::uint64_t sequence = 0;    // of its newest call
    std::optional<Notice> notice;  // why it is over, where it failed
  };
  Answer ask(const net::Fd& connection, const std::string& group_id, Deadline deadline) const;

  // The group has failed here: from now on, who asks is told why.
  void close(const std::string& group_id, const Notice& notice);

 private:
  struct Greeting;

  void serve();
  bool advance(Greeting& greeting);
  void deliver(const std::string& purpose, net::Fd connection);
  void answer(const std::string& group_id, const net::Fd& connection);

  net::Secret secret_;
  EndpointAddress address_;
  net::Fd unix_listener_;
  net::Fd tcp_listener_;
  net::Fd stop_event_;
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<Mailbox>> mailboxes_;
  std::vector<std::shared_ptr<Mailbox>> early_;  // of groups this process has yet to open
  std::map<std::string, Notice> failed_;         // groups that are over
  std::thread thread_;
};

}  // namespace lockstep::comm
