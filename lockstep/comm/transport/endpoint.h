// The place where the other processes of a job reach this process, for all groups that it is in.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/transport/mailroom.h>
#include <lockstep/net/address.h>
#include <lockstep/net/fd.h>
#include <lockstep/net/secret.h>

namespace lockstep::comm {

// The addresses at which other processes reach a process. Each process tells the others its own.
struct EndpointAddress {
  std::string host;  // identifies the host, its boot and its network: equal means shared memory
  std::string unix_name;  // name of its abstract Unix socket
  net::Address tcp;
  std::vector<int> cores;  // the cores that the process may run on

  std::string encode() const;
  static EndpointAddress decode(const std::string& text);  // CommError (corrupted)
};

// The medium of a connection.
enum class Medium : std::uint8_t { shared_memory, tcp };

// Listens on a Unix socket and, on the address it is given, on TCP. A thread greets the processes
// that connect and sorts their connections by group. A process that does not prove within two
// seconds that it knows the secret is dropped. Owned by the job; outlives every group.
class Endpoint {
 public:
  // `bind_host` is the TCP address to listen on; the system chooses the port.
  Endpoint(const std::string& bind_host, net::Secret secret);
  ~Endpoint();

  const EndpointAddress& address() const { return address_; }
  const net::Secret& secret() const { return secret_; }

  // Opens a group's mailbox. The group is open while the pointer lives.
  std::shared_ptr<Mailbox> open(const std::string& group_id) { return mailroom_.open(group_id); }

  // Connects to another endpoint's mailbox for a group, as rank `from` of it; tries again if the
  // connection is dropped while it is greeted. CommError (peer_lost) if nobody listens there any
  // more.
  net::Fd connect(const EndpointAddress& to, const std::string& group_id, int from, Medium medium,
                  Deadline deadline) const;
  // Asks another endpoint, over a fresh TCP connection to it, about the state of a group there.
  using Answer = GroupState;
  Answer ask(const net::Fd& connection, const std::string& group_id, Deadline deadline) const;

  // Asks the rank at another endpoint a question, and returns what its `answers` says. CommError if
  // it does not answer, or has no `answers`.
  std::string inquire(const EndpointAddress& to, const std::string& question,
                      Deadline deadline) const;
  // Sets the function that answers such questions here. It runs in the endpoint's thread and must
  // not block. After set_answers(nullptr) has returned, it is not called any more.
  using Answers = std::function<std::string(const std::string& question)>;
  void set_answers(Answers answers);

  // Notes that the group has failed here: ranks that ask are told why.
  void close(const std::string& group_id, const Notice& notice) {
    mailroom_.close(group_id, notice);
  }

 private:
  struct Greeting;
  struct Reception;

  void serve();
  bool serve(Reception& reception);
  void accept_from(const net::Fd& listener, Reception& reception);
  bool advance(Greeting& greeting);
  void deliver(const std::string& purpose, net::Fd connection);
  void answer(const std::string& group_id, const net::Fd& connection);
  void answer_inquiry(const std::string& question, const net::Fd& connection);

  net::Secret secret_;
  EndpointAddress address_;
  net::Fd unix_listener_;
  net::Fd tcp_listener_;
  net::Fd stop_event_;
  Mailroom mailroom_;
  std::mutex answers_mutex_;
  Answers answers_;
  std::thread thread_;
};

}  // namespace lockstep::comm
