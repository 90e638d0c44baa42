#include <lockstep/elastic/free_port.h>

#include <cstdint>
#include <span>

#include <lockstep/base/error.h>
#include <lockstep/net/secret.h>
#include <lockstep/net/socket.h>

namespace lockstep::elastic {

int free_port(const std::string& host) {
  // Below the range from which the kernel takes ports for outgoing connections, so that the port
  // stays free until rank 0 listens on it.
  constexpr int kLowest = 20000, kHighest = 32767;
  for (int attempt = 0; attempt < 100; ++attempt) {
    std::uint32_t draw = 0;
    net::fill_random(std::as_writable_bytes(std::span(&draw, 1)));
    const int port = kLowest + static_cast<int>(draw % (kHighest - kLowest + 1));
    try {
      net::listen_tcp({host, port});
      return port;
    } catch (const UsageError&) {
      // Taken: draw again. An address that is not this host's fails below, with its reason.
    }
  }
  return net::local_port(net::listen_tcp({host, 0}));
}

}  // namespace lockstep::elastic
