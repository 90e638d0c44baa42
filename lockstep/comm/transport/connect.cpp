#include <lockstep/comm/transport/connect.h>

#include <sched.h>

#include <algorithm>
#include <cerrno>

#include <lockstep/base/hash.h>
#include <lockstep/comm/transport/shm_link.h>
#include <lockstep/comm/transport/tcp_link.h>
#include <lockstep/net/socket.h>

namespace lockstep::comm {

namespace {

// Long enough to bridge the moment between two ranks' arrivals, short enough not to take a core
// from a thread that computes.
constexpr std::chrono::microseconds kSpin(50);

// The most ranks of a host that may interrupt each other whenever one of them falls asleep.
constexpr std::size_t kMostInterrupted = 16;

// Spinning pays only if every rank of this host can have a core to itself.
std::chrono::microseconds spin_for(const std::vector<EndpointAddress>& addresses,
                                   const std::string& host) {
  std::vector<bool> cores;
  int ranks = 0;
  for (const EndpointAddress& address : addresses) {
    if (address.host != host) continue;
    ++ranks;
    for (const int core : address.cores) {
      if (static_cast<std::size_t>(core) >= cores.size())
        cores.resize(static_cast<std::size_t>(core) + 1);
      cores[static_cast<std::size_t>(core)] = true;
    }
  }
  const auto available = std::count(cores.begin(), cores.end(), true);
  return ranks <= available ? kSpin : std::chrono::microseconds(0);
}

// True if the host answers but no process listens at the address any more.
bool is_gone(const EndpointAddress& address) {
  int error = 0;
  net::try_connect_tcp(address.tcp, Deadline::after(milliseconds(500)), error);
  return error == ECONNREFUSED;
}

// Waits for a peer's connection, and checks in between whether the peer is still there (`look`).
template <typename Look>
net::Fd take_connection(Mailbox& mailbox, int peer, const Deadline& deadline, Look look) {
  constexpr milliseconds kLookInterval(100);
  while (true) {
    const auto slice = std::min<Clock::duration>(kLookInterval, deadline.remaining());
    net::Fd connection = mailbox.take(peer, Deadline::after(slice));
    if (connection || deadline.passed()) return connection;
    look();
  }
}

// Runs in a thread of its own, which only a CommError may leave: a name that does not resolve any
// more, or a lack of descriptors, counts as no answer, too.
Endpoint::Answer ask(const Endpoint& endpoint, const EndpointAddress& to,
                     const std::string& group_id, Deadline deadline) {
  try {
    return endpoint.ask(net::connect_tcp(to.tcp, deadline, net::IfRefused::give_up), group_id,
                        deadline);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    throw CommError({.fault = Fault::timeout,
                     .operation = "ask " + to.tcp.text(),
                     .explanation = error.what()});
  }
}

// Computed from values that are equal on all ranks, as some may have links of one kind only.
std::size_t longest_view(const Topology& topology, Media media) {
  const int n = static_cast<int>(topology.host_of.size());
  const bool any_shared = media != Media::tcp && topology.num_hosts() < n;
  return any_shared ? std::min(ShmLayout(n).slot_bytes, TcpLink::kFragment) : TcpLink::kFragment;
}

}  // namespace

Topology topology_of(const std::vector<EndpointAddress>& addresses) {
  Topology topology;
  std::vector<std::string> hosts;
  for (const EndpointAddress& address : addresses) {
    const auto found = std::find(hosts.begin(), hosts.end(), address.host);
    topology.host_of.push_back(static_cast<int>(found - hosts.begin()));
    if (found == hosts.end()) hosts.push_back(address.host);
  }
  return topology;
}

std::string group_id_from(const std::string& text) {
  constexpr std::size_t kLongest = 200;
  if (text.size() <= kLongest) return text;
  return fmt::format("{:016x}{:016x}/{}", hash_text(text), hash_text(text + "/"),
                     text.substr(text.size() - kLongest / 2));
}

std::unique_ptr<Transport> connect_group(const std::shared_ptr<Endpoint>& endpoint,
                                         const Membership& membership, Media media,
                                         Deadline deadline) {
  const auto& addresses = membership.addresses;
  const int self = membership.rank;
  const int n = static_cast<int>(addresses.size());
  const EndpointAddress& own = addresses[static_cast<std::size_t>(self)];
  const Topology topology = topology_of(addresses);
  if (media == Media::shared_memory && topology.num_hosts() > 1)
    throw UsageError(
        "group '{}' spans {} hosts, which share no memory: use tcp, or let the backend "
        "be chosen automatically",
        membership.group_name, topology.num_hosts());

  const auto medium_to = [&](int peer) {
    const bool near = addresses[static_cast<std::size_t>(peer)].host == own.host;
    return near && media != Media::tcp ? Medium::shared_memory : Medium::tcp;
  };
  const auto spin = spin_for(addresses, own.host);
  const auto num_near = topology.ranks_on(topology.host_of[static_cast<std::size_t>(self)]).size();
  const auto payer = spin.count() > 0 && num_near <= kMostInterrupted
                         ? ShmSegment::FencePayer::sleeper
                         : ShmSegment::FencePayer::ringer;
  const auto mailbox = endpoint->open(membership.group_id);
  auto heap = std::make_shared<SharedHeap>();
  std::shared_ptr<ShmSegment> segment;
  std::vector<std::unique_ptr<Link>> links(static_cast<std::size_t>(n));
  const auto spare_frames = std::make_shared<SpareFrames>();

  const auto fail = [&](Fault fault, std::vector<int> ranks, const std::string& why) {
    throw CommError({.fault = fault,
                     .operation = "connect",
                     .group = membership.group_name,
                     .ranks = std::move(ranks),
                     .explanation = why});
  };
  const auto add_link = [&](int peer, net::Fd connection) {
    auto& link = links[static_cast<std::size_t>(peer)];
    if (medium_to(peer) == Medium::shared_memory) {
      if (!segment) segment = std::make_shared<ShmSegment>(n, payer);
      link = std::make_unique<ShmLink>(self, peer, std::move(connection), segment, heap, deadline);
    } else {
      link = std::make_unique<TcpLink>(
          self, peer, std::move(connection),
          TcpPeer{endpoint, mailbox, addresses[static_cast<std::size_t>(peer)],
                  membership.group_id},
          spare_frames);
    }
  };
  for (int peer = 0; peer < self; ++peer) {
    try {
      add_link(peer, endpoint->connect(addresses[static_cast<std::size_t>(peer)],
                                       membership.group_id, self, medium_to(peer), deadline));
    } catch (const CommError& error) {
      fail(error.fault(), {peer}, error.details().explanation);
    }
  }
  std::vector<int> missing;
  for (int peer = self + 1; peer < n; ++peer) {
    const auto& address = addresses[static_cast<std::size_t>(peer)];
    net::Fd connection = take_connection(*mailbox, peer, deadline, [&] {
      if (is_gone(address)) fail(Fault::peer_lost, {peer}, "Its process is gone.");
    });
    if (connection) {
      add_link(peer, std::move(connection));
    } else {
      missing.push_back(peer);
    }
  }
  if (!missing.empty())
    fail(Fault::timeout, missing,
         fmt::format("No connection came within {:.1f} s.", deadline.span_seconds()));

  std::vector<ShmLink*> near;
  std::vector<int> far;
  for (const auto& link : links) {
    if (!link) continue;
    if (auto* shm = dynamic_cast<ShmLink*>(link.get())) {
      near.push_back(shm);
    } else {
      far.push_back(link->peer());
    }
  }
  mailbox->keep_only(far);  // shared memory never connects again
  auto transport = std::make_unique<Transport>(
      Transport::Settings{.group = membership.group_name,
                          .rank = self,
                          .topology = topology,
                          .spin = spin,
                          .longest_view = longest_view(topology, media),
                          .mailbox = mailbox,
                          .ask =
                              [endpoint, membership](int peer, Deadline soon) {
                                return ask(*endpoint,
                                           membership.addresses[static_cast<std::size_t>(peer)],
                                           membership.group_id, soon);
                              }},
      std::move(links), heap);
  heap->set_announce([near](std::uint32_t number, const std::shared_ptr<SharedMemory>& memory) {
    for (ShmLink* link : near) link->announce(number, memory);
  });
  return transport;
}

}  // namespace lockstep::comm
