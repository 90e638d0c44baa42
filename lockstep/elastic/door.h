// A launcher's door: where other launchers come in, and nobody else.
#pragma once

#include <cstddef>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/elastic/channel.h>
#include <lockstep/elastic/introduction.h>
#include <lockstep/net/address.h>
#include <lockstep/net/fd.h>
#include <lockstep/net/handshake.h>
#include <lockstep/net/secret.h>

namespace lockstep::elastic {

inline constexpr const char* kLauncherPurpose = "lockstep launcher";

struct Arrival {
  Channel channel;
  Introduction introduction;
};

// Owns its listening socket and a thread, which both end with it. Who does not prove to know the
// job's secret, and say who it is, within a few seconds is dropped; many silent strangers at once
// hold up nobody, for the oldest of them has to go. A launcher that is dropped so is told of in the
// log, now and then. Thread-safe.
class Door {
 public:
  // Listens on exactly `address`; UsageError where that cannot be.
  Door(const net::Address& address, const net::Secret& secret);
  ~Door();
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

  // With the port it got.
  const net::Address& address() const { return address_; }

  // Readable while there are arrivals.
  int fd() const { return event_.get(); }

  // Those who have come since the last call, in order.
  std::vector<Arrival> arrivals();

  // From now on all who come are told this and sent away; an empty word lets them in again.
  void send_away(const std::string& word, const std::string& text);

 private:
  // Somebody at the door.
  struct Caller {
    net::Fd socket;
    std::string host;
    net::Acceptor acceptor;
    Clock::time_point since = Clock::now();
    std::optional<Channel> channel;  // once it has proven itself
  };
  enum class Progress { waits, gone, came_in };

  void run(const std::stop_token& stop);
  void accept();
  Progress attend(Caller& caller);
  void tell_of_wrong_secret(const Caller& caller);
  void admit(Arrival arrival);

  const net::Secret secret_;
  const net::Fd listener_;
  const net::Address address_;
  const net::Fd event_;
  const net::Fd stop_;

  std::mutex mutex_;  // guards what follows
  std::vector<Arrival> arrived_;
  std::string word_, text_;

  std::list<Caller> callers_;      // the thread's own, oldest first
  Clock::time_point quiet_until_;  // likewise: about wrong secrets
  std::jthread thread_;
};

}  // namespace lockstep::elastic
