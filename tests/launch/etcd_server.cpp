#include "etcd_server.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <cstdlib>

#include <lockstep/net/socket.h>

namespace lockstep::launch::testing {

namespace {

// A port that is free now, and most likely still in a moment.
int port_for_etcd() { return net::local_port(net::listen_tcp({"127.0.0.1", 0})); }

// A place in memory if possible: etcd syncs whatever it is told, and a busy disk would hold it up.
std::string place_for_data() { return ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp"; }

// On some processors etcd runs only with a variable that accepts that they are unsupported.
std::string consent() {
  utsname machine;
  ::uname(&machine);
  const std::string name = machine.machine;
  return "ETCD_UNSUPPORTED_ARCH=" + (name == "aarch64" ? "arm64" : name);
}

}  // namespace

bool EtcdServer::installed() { return std::system("command -v etcd > /dev/null 2>&1") == 0; }

EtcdServer::EtcdServer()
    : folder_(place_for_data()),
      address_{"127.0.0.1", port_for_etcd()},
      peer_port_(port_for_etcd()) {}

EtcdServer::EtcdServer(const std::string& namespace_name, const std::string& host)
    : folder_(place_for_data()),
      namespace_(namespace_name),
      address_{host, 2379},
      peer_port_(2380) {}

bool EtcdServer::start() {
  process_.reset();
  const std::string peer = "http://127.0.0.1:" + std::to_string(peer_port_);
  const std::string client = "http://" + address_.text();
  std::vector<std::string> command;
  if (!namespace_.empty()) command = {"ip", "netns", "exec", namespace_};
  for (const std::string& word :
       {std::string("etcd"), std::string("--data-dir"), (folder_.path() / "data").string(),
        std::string("--listen-client-urls"), client, std::string("--advertise-client-urls"), client,
        std::string("--listen-peer-urls"), peer, std::string("--initial-advertise-peer-urls"), peer,
        std::string("--initial-cluster"), "default=" + peer})
    command.push_back(word);
  process_ = std::make_unique<Launched>(std::move(command), std::vector<std::string>{consent()});
  return eventually(milliseconds(60'000), [&] {
    return log().find("ready to serve client requests") != std::string::npos;
  });
}

void EtcdServer::kill(int signal) { process_->kill(signal); }

std::string EtcdServer::log() const { return process_->output() + process_->error(); }

}  // namespace lockstep::launch::testing
