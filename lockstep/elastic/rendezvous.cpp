#include <lockstep/elastic/rendezvous.h>

#include <netinet/in.h>

#include <cstdlib>
#include <span>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/elastic/reception.h>
#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>
#include <lockstep/store/client.h>

namespace lockstep::elastic {

using Json = nlohmann::json;

namespace {

constexpr const char* kPortKey = "lockstep/launcher/port";

std::string encode(const Layout& layout) {
  Json nodes = Json::array();
  for (const Node& node : layout.nodes)
    nodes.push_back({{"host", node.host}, {"num_ranks", node.num_ranks}});
  const Json json = {{"nodes", nodes},
                     {"node_rank", layout.node_rank},
                     {"master_addr", layout.master_addr},
                     {"master_port", layout.master_port},
                     {"store", layout.store}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Layout decode_layout(const std::string& text) {
  const Json json = Json::parse(text);
  Layout layout;
  for (const Json& node : json.at("nodes"))
    layout.nodes.push_back({node.at("host"), node.at("num_ranks")});
  layout.node_rank = json.at("node_rank");
  layout.master_addr = json.at("master_addr");
  layout.master_port = json.at("master_port");
  layout.store = json.at("store");
  return layout;
}

[[noreturn]] void fail(Fault fault, const std::string& explanation) {
  throw CommError(
      {.fault = fault, .operation = "meeting of the launchers", .explanation = explanation});
}

bool is_loopback(const std::string& host) {
  const net::SocketAddress first = net::resolve({host, 0}).front();
  if (first.get()->sa_family == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(first.get())->sin6_addr);
  const auto* address = reinterpret_cast<const sockaddr_in*>(first.get());
  return ntohl(address->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

Membership host(const RendezvousOptions& options, const net::Secret& secret,
                std::unique_ptr<store::Server> server) {
  Membership membership;
  membership.server = std::move(server);
  Layout& layout = membership.layout;
  layout.nodes.resize(static_cast<std::size_t>(options.num_nodes));
  layout.nodes[0] = {options.host, options.num_local_ranks};
  layout.master_addr = options.master_addr;
  // The name as users gave it, which other hosts know as well; the port as the server got it.
  layout.store = net::Address{options.endpoint.host, membership.server->address().port}.text();
  membership.channels.resize(layout.nodes.size());
  if (options.num_nodes > 1) {
    const Deadline deadline = Deadline::after(options.timeout);
    const net::Fd listener = net::listen_tcp({options.endpoint.host, 0});
    store::Client(net::Address::parse(layout.store, 0, "store"), secret, deadline)
        .set(kPortKey, std::to_string(net::local_port(listener)), deadline);
    log::info("this is node 0, waiting at {} for {} more", layout.store, options.num_nodes - 1);
    std::vector<Guest> guests =
        receive_guests(listener, secret, {options.num_nodes, options.run_id}, deadline);
    std::string missing = missing_nodes(guests, options.num_nodes);
    if (!missing.empty()) {
      missing += fmt::format(" of {} did not come within {:.1f} s", options.num_nodes,
                             deadline.span_seconds());
      for (Guest& guest : guests) guest.channel.send("refused", missing);
      std::string advice = "Start 'lockstep run' on every host with the same --nnodes and "
                           "--rdzv-endpoint (or --master-addr and --master-port), or raise "
                           "--timeout.";
      if (is_loopback(options.endpoint.host))
        advice += fmt::format(" '{}' is a loopback address, which other hosts cannot reach: give "
                              "an address of this host on their network.",
                              options.endpoint.host);
      fail(Fault::timeout,
           fmt::format("{}; this is node 0, at {}. {}", missing, layout.store, advice));
    }
    assign_node_ranks(guests, options.num_nodes);
    for (Guest& guest : guests) {
      const auto node = static_cast<std::size_t>(guest.node_rank);
      layout.nodes[node] = {guest.host, guest.num_ranks};
      membership.channels[node] = std::move(guest.channel);
    }
  }
  layout.master_port =
      options.master_port != 0 ? options.master_port : free_port(options.master_addr);
  for (int node = 1; node < options.num_nodes; ++node) {
    layout.node_rank = node;
    membership.channels[static_cast<std::size_t>(node)].send("layout", encode(layout));
  }
  layout.node_rank = 0;
  return membership;
}

// Connects to the listener of node 0's launcher, having learnt its port from the store.
Channel knock(const RendezvousOptions& options, const net::Secret& secret,
              const Deadline& deadline) {
  const std::string where = options.endpoint.text();
  try {
    store::Client client(options.endpoint, secret, deadline);
    const std::string port = client.wait({kPortKey}, deadline).front();
    net::Fd socket = net::connect_tcp({options.endpoint.host, std::atoi(port.c_str())}, deadline);
    net::introduce(socket, secret, kLauncherPurpose, deadline);
    return Channel(std::move(socket));
  } catch (const CommError& error) {
    if (error.fault() == Fault::refused)
      fail(Fault::refused,
           fmt::format("What listens at {} does not know this job's secret: give the same "
                       "--secret-file (or LOCKSTEP_SECRET_FILE) on every host, and check that no "
                       "other job uses that address.",
                       where));
    fail(error.fault(),
         fmt::format("Node 0 did not answer at {} within {:.1f} s: start 'lockstep run' there with "
                     "the same --rdzv-endpoint (or --master-addr and --master-port), and check "
                     "that a firewall lets it be reached. ({})",
                     where, deadline.span_seconds(), error.what()));
  }
}

Membership join(const RendezvousOptions& options, const net::Secret& secret) {
  const Deadline deadline = Deadline::after(options.timeout);
  Channel channel = knock(options, secret, deadline);
  channel.send("hello", Introduction{options.node_rank.value_or(-1), options.num_nodes,
                                     options.num_local_ranks, options.host, options.run_id}
                            .encode());
  // Node 0 knows best who is missing: its word is worth waiting a little longer for.
  const auto answer = channel.receive(Deadline(deadline.at() + std::chrono::seconds(2)));
  if (!answer && channel.open())
    fail(Fault::timeout,
         fmt::format("Node 0 at {} is there, but not all of the {} nodes came within {:.1f} s.",
                     options.endpoint.text(), options.num_nodes, deadline.span_seconds()));
  if (!answer)
    fail(Fault::peer_lost, fmt::format("The launcher of node 0 at {} went away before all of the "
                                       "{} nodes had come.",
                                       options.endpoint.text(), options.num_nodes));
  if (answer->word == "refused")
    fail(Fault::refused,
         fmt::format("Node 0 at {} says: {}.", options.endpoint.text(), answer->text));
  Membership membership;
  try {
    membership.layout = decode_layout(answer->text);
  } catch (const Json::exception& error) {
    fail(Fault::corrupted, fmt::format("Node 0 sent a layout in a form this launcher does not know "
                                       "({}): use the same version of lockstep on every host.",
                                       error.what()));
  }
  LOCKSTEP_CHECK(membership.layout.node_rank > 0 &&
                 membership.layout.node_rank < membership.layout.num_nodes());
  membership.channels.push_back(std::move(channel));
  return membership;
}

}  // namespace

Membership meet(const RendezvousOptions& options, const net::Secret& secret) {
  net::resolve(options.endpoint);
  if (options.num_nodes == 1 || options.node_rank == 0)
    return host(options, secret, std::make_unique<store::Server>(options.endpoint, secret));
  if (!options.node_rank) {
    // Whoever can listen at the endpoint is node 0.
    std::unique_ptr<store::Server> server;
    try {
      server = std::make_unique<store::Server>(options.endpoint, secret);
    } catch (const UsageError& error) {
      log::info("joining node 0 at {} ({})", options.endpoint.text(), error.what());
    }
    if (server) return host(options, secret, std::move(server));
  }
  return join(options, secret);
}

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
