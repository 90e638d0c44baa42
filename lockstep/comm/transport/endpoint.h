// Where a process can be reached by the others of its job, for all groups it is in.
#pragma once

#include <condition_variable>
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
  std::string host;       // identifies the host, its boot and its network: equal means shared memory
  std::string unix_name;  // of its abstract Unix socket
  net::Address tcp;

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

  // From now on, who connects is told this and nothing else.
  void close_with(const Notice& notice);

 private:
  friend class Endpoint;
  void put(int from, net::Fd connection);

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<int, net::Fd> waiting_;
  std::optional<Notice> verdict_;
  net::Fd event_;
};

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
  net::Fd connect(const EndpointAddress& to, const std::string& group_id, int from, bool over_tcp,
                  Deadline deadline) const;

 private:
  void serve();
  void greet(net::Fd connection);

  net::Secret secret_;
  EndpointAddress address_;
  net::Fd unix_listener_;
  net::Fd tcp_listener_;
  net::Fd stop_event_;
  std::mutex mutex_;
  std::condition_variable greeted_;
  int num_greeting_ = 0;
  std::map<std::string, std::weak_ptr<Mailbox>> mailboxes_;
  std::thread thread_;
};

}  // namespace lockstep::comm
