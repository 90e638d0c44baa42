// Runs the real etcd for one test.
#pragma once

#include <memory>
#include <string>

#include <lockstep/net/address.h>

#include "launched.h"

namespace lockstep::launch::testing {

// One member with its own folder and ports, which ends with the object. If it was killed, it can be
// started again with its data.
class EtcdServer {
 public:
  // Whether it is installed.
  static bool installed();

  // Listens on loopback.
  EtcdServer();
  // Listens at an address in a network namespace, which the test itself may not reach.
  EtcdServer(const std::string& namespace_name, const std::string& host);

  // False if it did not get ready.
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
