#include <lockstep/elastic/join_job.h>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/elastic/door.h>
#include <lockstep/elastic/hub.h>
#include <lockstep/elastic/join_by_election.h>
#include <lockstep/elastic/knock.h>
#include <lockstep/elastic/member.h>
#include <lockstep/net/socket.h>

namespace lockstep::elastic {

namespace {

// What a launcher of no job yet says at its door.
constexpr const char* kNobody = "nobody";
constexpr milliseconds kOneVisit(1500);
constexpr milliseconds kQuickVisit(900);
constexpr int kVisitsOfTheBusy = 3;

std::shared_ptr<Door> standby_door(const MeetingOptions& options, const net::Secret& secret) {
  std::shared_ptr<Door> door;
  for (std::size_t i = 1; i < options.endpoints.size() && !door; ++i) {
    try {
      door = std::make_shared<Door>(options.endpoints[i], secret);
    } catch (const UsageError& error) {
      log::debug("{}", error.what());  // another host's
    }
  }
  if (!door)
    door = std::make_shared<Door>(
        net::Address{net::local_host_toward(options.endpoints.front()), 0}, secret);
  door->send_away(kNobody, "");
  return door;
}

// Of an endpoint that is this host's and that somebody listens at already: the visit, where node 0
// is there, and a launcher answers at once. Nothing where it may come yet. Throws `taken` where
// something has the port that is no launcher of this job.
std::optional<Visit> visit_on_this_host(const net::Address& endpoint, const Introduction& who,
                                        const net::Secret& secret, const UsageError& taken) {
  try {
    net::listen_tcp({endpoint.host, 0});
  } catch (const UsageError&) {
    return std::nullopt;  // another host's
  }
  for (int attempt = 0; attempt < 2; ++attempt) {
    // One that is welcome has a seat: it is not to be visited again.
    Visit found = visit(endpoint, who, secret, Deadline::after(kQuickVisit));
    if (found.outcome == Visit::Outcome::welcome) return found;
    if (found.outcome != Visit::Outcome::stranger) return std::nullopt;
  }
  throw taken;
}

// A job that has gone on without its first endpoint's host, which comes back.
std::optional<Visit> running_job(const MeetingOptions& options, const net::Secret& secret,
                                 const Door& door) {
  const Introduction who = introduce(options, door.address().text());
  for (std::size_t i = 1; i < options.endpoints.size(); ++i) {
    for (int attempt = 0; attempt < kVisitsOfTheBusy; ++attempt) {
      Visit found = visit(options.endpoints[i], who, secret, Deadline::after(kOneVisit));
      if (found.outcome == Visit::Outcome::elsewhere)
        found = visit(found.hub, who, secret, Deadline::after(kOneVisit));
      if (found.outcome == Visit::Outcome::welcome) return found;
      if (!found.reason.empty()) break;
    }
  }
  return std::nullopt;
}

}  // namespace

std::unique_ptr<Peers> join_job(const MeetingOptions& options, const net::Secret& secret) {
  if (options.rendezvous == Rendezvous::etcd) return join_by_election(options, secret);
  const net::Address& endpoint = options.endpoints.front();
  const bool may_be_first = options.node_rank.value_or(0) == 0 || options.max_nodes == 1;
  std::shared_ptr<Door> door;
  std::optional<UsageError> taken;
  if (may_be_first) {
    try {
      door = std::make_shared<Door>(endpoint, secret);
    } catch (const UsageError& error) {
      if (options.node_rank || options.max_nodes == 1) throw;
      taken = error;
    }
  }
  if (door) {  // whoever can listen at the endpoint is node 0
    door->send_away(kNobody, "");
    if (auto found = running_job(options, secret, *door))
      return std::make_unique<Member>(options, secret, std::move(door), nullptr, std::move(*found));
    door->send_away("", "");
    return std::make_unique<Hub>(options, secret, std::move(door), nullptr);
  }
  if (options.max_restarts > 0) door = standby_door(options, secret);
  const Introduction who = introduce(options, door ? door->address().text() : "");
  std::optional<Visit> found;
  if (taken) {
    found = visit_on_this_host(endpoint, who, secret, *taken);
    log::info("joining node 0 at {}", endpoint.text());
  }
  if (!found) found = find_hub(options.endpoints, who, secret, Deadline::after(options.timeout));
  return std::make_unique<Member>(options, secret, std::move(door), nullptr, std::move(*found));
}

}  // namespace lockstep::elastic
