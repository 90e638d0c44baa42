// Sockets whose every wait has a deadline. All sockets made here are non-blocking and closed on
// exec.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/net/address.h>
#include <lockstep/net/fd.h>

namespace lockstep::net {

// Listens on exactly the given address. UsageError if the port is taken or the address is not one
// of this host's.
Fd listen_tcp(const Address& address, int backlog = 1024);

// The address, or only the port, to which a socket is bound.
Address local_address(const Fd& socket);
int local_port(const Fd& socket);
// The address of the other end; its host is empty if the peer is gone already.
Address peer_address(const Fd& socket);

// A port of this host for another process to listen on: nobody listens there now, and the kernel
// does not assign it to outgoing connections.
int free_port(const std::string& host);

// The meaning of a refused connection: nobody listens there yet (try again), or nobody does any
// more (give up).
enum class IfRefused { try_again, give_up };

// Connects, and tries again until the deadline. CommError names the address and the last reason:
// timeout, or peer_lost at once if nobody listens and the caller asked to give up then.
Fd connect_tcp(const Address& address, const Deadline& deadline,
               IfRefused if_refused = IfRefused::try_again);

// Makes one attempt. On failure returns an empty Fd, with the reason (an errno) in `error`.
Fd try_connect_tcp(const Address& address, const Deadline& deadline, int& error);

// Abstract Unix sockets: they have no file, so nothing is left behind.
inline constexpr std::size_t kLongestUnixName = 107;
Fd listen_unix(const std::string& name, int backlog = 1024);
Fd connect_unix(const std::string& name, const Deadline& deadline);

// Two connected stream sockets.
std::pair<Fd, Fd> socket_pair();

// Takes one waiting connection; without one, returns an empty Fd, with the reason in errno.
Fd accept(const Fd& listener);
// Whether that reason is a lack of descriptors or memory. The connection goes on waiting, and so
// does its listener's event: a caller that polls it must pause, or it spins.
bool out_of_descriptors(int error);

// A counter that is readable while it is not 0 (eventfd). UsageError if no descriptor is left.
Fd make_event();

void set_no_delay(const Fd& socket);

// Makes the kernel find out within half a minute that a peer's host, or the way to it, is gone:
// that closes no connection by itself.
void set_keep_alive(const Fd& socket);

// Waits until `fd` is ready for `events` (POLLIN, POLLOUT). False at the deadline.
bool wait_ready(int fd, short events, const Deadline& deadline);

// Read and write whole buffers. CommError: timeout at the deadline, peer_lost if the other side has
// closed.
void read_all(const Fd& socket, std::span<std::byte> bytes, const Deadline& deadline);
void write_all(const Fd& socket, std::span<const std::byte> bytes, const Deadline& deadline);

// Passes open descriptors over a Unix socket, with one byte of payload.
void send_descriptors(const Fd& socket, const std::vector<int>& descriptors,
                      const Deadline& deadline);
std::vector<Fd> receive_descriptors(const Fd& socket, std::size_t count, const Deadline& deadline);

}  // namespace lockstep::net
