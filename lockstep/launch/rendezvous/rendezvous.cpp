#include <lockstep/launch/rendezvous/rendezvous.h>

#include <thread>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/launch/rendezvous/connection.h>
#include <lockstep/launch/rendezvous/election.h>
#include <lockstep/launch/rendezvous/follower.h>
#include <lockstep/launch/rendezvous/leader.h>
#include <lockstep/net/socket.h>

namespace lockstep::launch {

std::optional<RankTable> Peers::next_table() { return std::exchange(next_, std::nullopt); }

void Peers::begin(const RankTable& table) {
  failure_.reset();
  decision_.reset();
  paused_ = false;
  all_done_ = false;
  next_ = table;
}

Introduction RendezvousOptions::introduction(const std::string& address) const {
  return {.node_rank = node_rank.value_or(-1),
          .min_nodes = min_nodes,
          .max_nodes = max_nodes,
          .num_ranks = num_local_ranks,
          .host = host,
          .run_id = run_id,
          .address = address};
}

namespace {

constexpr milliseconds kAttemptToJoin(1500);
constexpr milliseconds kBetweenStatusLooks(20);
// The answer of a launcher that is of no job yet.
constexpr const char* kNobody = "nobody";

// An address of this host at which others can reach it. Where an etcd member runs on this host, the
// way there may lead over a loopback address: then another member's is used.
std::string own_host(const RendezvousOptions& options) {
  if (!options.local_addr.empty()) {
    try {
      net::listen_tcp({options.local_addr, 0});
      return options.local_addr;
    } catch (const UsageError& error) {  // it is only a name for messages
      log::debug("{}", error.what());
    }
  }
  std::string host;
  for (const net::Address& member : options.endpoints) {
    host = net::local_host_toward(member);
    if (!host.starts_with("127.") && host != "::1") break;
  }
  return host;
}

[[noreturn]] void nobody_found(const Election& election, const Election::Status& status,
                               const std::string& last_reason, const Deadline& deadline) {
  std::string what;
  if (!status.trouble.empty() || status.leadership == Election::Leadership::unknown) {
    what =
        fmt::format("etcd at {} gave no useful answer within {:.1f} s ({}): start it, or correct "
                    "--rdzv-endpoint.",
                    election.where(), deadline.span_seconds(), status.trouble);
  } else if (status.leadership == Election::Leadership::others) {
    what = fmt::format("Node 0 did not answer within {:.1f} s at {}, where it is by the key {} in "
                       "etcd ({}): check that a firewall lets it be reached, and that no other "
                       "job has the same --rdzv-id.",
                       deadline.span_seconds(), status.leader.text(), election.key(), last_reason);
  } else {
    what = fmt::format("Nobody became node 0 within {:.1f} s: start the launcher with --node-rank "
                       "0, or leave --node-rank out on all hosts.",
                       deadline.span_seconds());
  }
  fail_rendezvous(Fault::timeout, what);
}

std::unique_ptr<Peers> join_by_election(const RendezvousOptions& options,
                                        const net::Secret& secret) {
  const auto listener = std::make_shared<Listener>(net::Address{own_host(options), 0}, secret);
  listener->turn_away(kNobody);
  const auto election =
      std::make_shared<Election>(options.endpoints, options.run_id, listener->address());
  election->wish(Election::wish_of_newcomer(options.node_rank));
  const Introduction introduction = options.introduction(listener->address().text());
  const Deadline deadline = Deadline::after(options.timeout);
  std::uint64_t answers_seen = 0;
  std::string last_reason;
  while (true) {
    const Election::Status status = election->status();
    if (status.leadership == Election::Leadership::ours)
      return std::make_unique<Leader>(options, secret, listener, election);
    if (status.leadership == Election::Leadership::others && status.answers != answers_seen) {
      answers_seen = status.answers;
      Attempt found =
          try_to_join(status.leader, introduction, secret, Deadline::after(kAttemptToJoin));
      if (found.outcome == Attempt::Outcome::accepted)
        return std::make_unique<Follower>(options, secret, listener, election, std::move(found));
      last_reason = found.outcome == Attempt::Outcome::not_ready
                        ? "a launcher is there, but not node 0's"
                        : found.reason;
    }
    if (deadline.passed()) nobody_found(*election, status, last_reason, deadline);
    std::this_thread::sleep_for(kBetweenStatusLooks);
  }
}

// A listener for the day that the leader is lost.
std::shared_ptr<Listener> standby_listener(const RendezvousOptions& options,
                                           const net::Secret& secret) {
  std::shared_ptr<Listener> listener;
  for (std::size_t i = 1; i < options.endpoints.size() && !listener; ++i) {
    try {
      listener = std::make_shared<Listener>(options.endpoints[i], secret);
    } catch (const UsageError& error) {
      log::debug("{}", error.what());  // the endpoint is another host's
    }
  }
  if (!listener)
    listener = std::make_shared<Listener>(
        net::Address{net::local_host_toward(options.endpoints.front()), 0}, secret);
  listener->turn_away(kNobody);
  return listener;
}

// Joins the leader at an endpoint of this host, at which somebody listens already; the leader would
// answer at once. Nothing where the leader may still come. Throws `taken` where something that is
// no launcher of this job has the port.
std::optional<Attempt> join_on_this_host(const net::Address& endpoint,
                                         const Introduction& introduction,
                                         const net::Secret& secret, const UsageError& taken) {
  constexpr milliseconds kQuickAttempt(900);
  try {
    net::listen_tcp({endpoint.host, 0});
  } catch (const UsageError&) {
    return std::nullopt;  // the endpoint is another host's
  }
  for (int attempt = 0; attempt < 2; ++attempt) {
    // Once accepted, this launcher is a member, and must not introduce itself again.
    Attempt found = try_to_join(endpoint, introduction, secret, Deadline::after(kQuickAttempt));
    if (found.outcome == Attempt::Outcome::accepted) return found;
    if (found.outcome != Attempt::Outcome::stranger) return std::nullopt;
  }
  throw taken;
}

// Joins a job that has gone on without the host of its first endpoint, to which that host comes
// back.
std::optional<Attempt> join_running_job(const RendezvousOptions& options, const net::Secret& secret,
                                        const Listener& listener) {
  constexpr int kAttemptsWhileBusy = 3;
  const Introduction introduction = options.introduction(listener.address().text());
  for (std::size_t i = 1; i < options.endpoints.size(); ++i) {
    for (int attempt = 0; attempt < kAttemptsWhileBusy; ++attempt) {
      Attempt found = try_to_follow(options.endpoints[i], introduction, secret, kAttemptToJoin);
      if (found.outcome == Attempt::Outcome::accepted) return found;
      if (!found.reason.empty()) break;
    }
  }
  return std::nullopt;
}

}  // namespace

std::unique_ptr<Peers> join_job(const RendezvousOptions& options, const net::Secret& secret) {
  if (options.rendezvous == Rendezvous::etcd) return join_by_election(options, secret);
  const net::Address& endpoint = options.endpoints.front();
  const bool may_lead = options.node_rank.value_or(0) == 0 || options.max_nodes == 1;
  std::shared_ptr<Listener> listener;
  std::optional<UsageError> taken;
  if (may_lead) {
    try {
      listener = std::make_shared<Listener>(endpoint, secret);
    } catch (const UsageError& error) {
      if (options.node_rank || options.max_nodes == 1) throw;
      taken = error;
    }
  }
  if (listener) {  // the launcher that can listen at the endpoint leads
    listener->turn_away(kNobody);
    if (auto found = join_running_job(options, secret, *listener))
      return std::make_unique<Follower>(options, secret, std::move(listener), nullptr,
                                        std::move(*found));
    listener->let_in();
    return std::make_unique<Leader>(options, secret, std::move(listener), nullptr);
  }
  if (options.max_restarts > 0) listener = standby_listener(options, secret);
  const Introduction introduction =
      options.introduction(listener ? listener->address().text() : "");
  std::optional<Attempt> found;
  if (taken) {
    found = join_on_this_host(endpoint, introduction, secret, *taken);
    log::info("joining node 0 at {}", endpoint.text());
  }
  if (!found)
    found = find_leader(options.endpoints, introduction, secret, Deadline::after(options.timeout));
  return std::make_unique<Follower>(options, secret, std::move(listener), nullptr,
                                    std::move(*found));
}

}  // namespace lockstep::launch
