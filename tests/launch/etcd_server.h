// The real etcd, for a test of its own.
#pragma once

#include <memory>
#include <string>

#include <lockstep/net/address.h>

#include "launched.h"

namespace lockstep::launch::testing {

// One member, with its own folder and ports, which ends with the object. Killed, it can be started
// again with what it had.
class EtcdServer {
 public:
  // Whether it is installed.
  static bool installed();

  // On loopback.
  EtcdServer();
  // At an address in a network namespace; it may not be reachable from the test itself.
  EtcdServer(const std::string& namespace_name, const std::string& host);

  // False where it did not get ready.
  bool start();
  void kill(int signal);

  const net::Address& address() const { return address_; }
  std::string log() const;

 private:
  const Folder folder_;
  const std::string namespace_;
  net::Address address_;
  int peer_port_ = 0;
  std::unique_ptr<Launched> process_;
};

#define ETCD_OR_SKIP() \
  if (!EtcdServer::installed()) GTEST_SKIP() << "etcd is not installed (Debian: etcd-server)"

}  // namespace lockstep::launch::testing
