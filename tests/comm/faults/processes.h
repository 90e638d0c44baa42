// Ranks as forked processes with real links, which can be killed, stopped and cut off.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/comm/algorithms/collectives.h>
#include <lockstep/comm/transport/connect.h>

namespace lockstep::comm::faults {

// How a rank ended. None of the three is true of a rank that has not.
struct Outcome {
  bool finished = false;  // its body returned
  bool failed = false;    // with the CommError described below
  Fault fault = Fault::aborted;
  std::vector<int> ranks;
  std::string text;
  Clock::time_point at{};  // when the error was caught
  std::string said;        // all lines that the rank wrote
  bool gone = false;       // it was killed or crashed, without an outcome
};

// The interface for a rank's body.
class Rank {
 public:
  Rank(Endpoint& endpoint, std::unique_ptr<Transport> transport, int in, int out)
      : endpoint_(endpoint), transport_(std::move(transport)), in_(in), out_(out) {}

  int rank() const { return transport_->rank(); }
  int size() const { return transport_->size(); }
  Transport& transport() { return *transport_; }
  Endpoint& endpoint() { return endpoint_; }

  // Numbers the call and begins it, as a communicator would.
  void begin(Fingerprint call, milliseconds timeout = milliseconds(20'000));

  // Sends a line to the parent.
  void say(const std::string& line) const;
  // Waits until the parent sends this word.
  void hear(const std::string& word) const;

 private:
  Endpoint& endpoint_;
  std::unique_ptr<Transport> transport_;
  int in_;
  int out_;
  std::uint64_t sequence_ = 0;
};

struct JobOptions {
  Media media = Media::automatic;
  // The network namespace (a file under /var/run/netns) and address of each rank; empty: all on
  // loopback.
  std::vector<std::string> namespaces;
  std::vector<std::string> hosts;
  // Whether a rank that has failed stays, like a program that caught the error, or ends at once
  // without a destructor, like a program that did not.
  enum class Afterwards { go, stay } afterwards = Afterwards::go;
  // Changes the address of rank `of` that rank `reader` is told, to put proxies between ranks.
  std::function<void(int reader, int of, EndpointAddress&)> reroute;
};

// A job of n ranks that all run `body`. A CommError in it is sent to the others, as a communicator
// does, and becomes the outcome. The destructor kills the remaining ranks.
class Job {
 public:
  Job(int n, const JobOptions& options, const std::function<void(Rank&)>& body);
  ~Job();
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int size() const { return static_cast<int>(children_.size()); }
  const EndpointAddress& address(int rank) const { return child(rank).address; }
  const net::Secret& secret() const { return secret_; }

  // Waits until the rank has sent a line.
  bool says(int rank, const std::string& line, milliseconds longest = milliseconds(20'000));
  // Sends a word to a rank.
  void tell(int rank, const std::string& word);
  // Sends a signal and returns the time just before.
  Clock::time_point signal(int rank, int signal);
  // Stops a rank, and waits until it is.
  void stop(int rank);
  // Waits until a rank has ended.
  Outcome outcome(int rank, milliseconds longest = milliseconds(30'000));

 private:
  struct Child {
    pid_t pid = -1;
    net::Fd in;
    net::Fd out;
    std::string said;
    EndpointAddress address;
    bool closed = false;
  };
  Child& child(int rank) { return children_[static_cast<std::size_t>(rank)]; }
  const Child& child(int rank) const { return children_[static_cast<std::size_t>(rank)]; }
  void read(Child& from, milliseconds longest);
  bool await(Child& from, const std::function<bool()>& there, milliseconds longest);

  net::Secret secret_;
  std::vector<Child> children_;
};

}  // namespace lockstep::comm::faults
