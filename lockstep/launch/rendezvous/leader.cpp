#include <lockstep/launch/rendezvous/leader.h>

#include <netinet/in.h>

#include <algorithm>
#include <set>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/launch/rendezvous/follower.h>
#include <lockstep/net/socket.h>

namespace lockstep::launch {

namespace {

constexpr int kMostRanksOfAHost = 1 << 16;

// Nodes that come within this time have the job formed again once, not once each.
constexpr milliseconds kComeTogether(1000);

// After a takeover: how long survivors have to come before the job goes on without them, and how
// long to wait for more than half of the last table.
constexpr milliseconds kSurvivorsCome(3000);
constexpr milliseconds kQuorumComes(6000);

// How long etcd has to say whether this launcher still leads, before others count as lost: they may
// have gone over to the next leader.
constexpr milliseconds kEtcdAnswers(1000);

double seconds(milliseconds span) { return std::chrono::duration<double>(span).count(); }

bool is_loopback(const std::string& host) {
  const net::SocketAddress first = net::resolve({host, 0}).front();
  if (first.get()->sa_family == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(first.get())->sin6_addr);
  const auto* address = reinterpret_cast<const sockaddr_in*>(first.get());
  return ntohl(address->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

}  // namespace

Leader::Leader(RendezvousOptions options, const net::Secret& secret,
               std::shared_ptr<Listener> listener, std::shared_ptr<Election> election)
    : options_(std::move(options)),
      secret_(secret),
      listener_(std::move(listener)),
      election_(std::move(election)),
      leads_(!election_),
      gather_deadline_(Deadline::after(options_.timeout)) {
  members_.push_back({.who = options_.introduction(listener_->address().text()), .node_rank = 0});
  if (options_.max_nodes > 1)
    log::info("this is node 0, waiting at {} for {} more", listener_->address().text(),
              node_range(options_.min_nodes - 1, options_.max_nodes - 1));
}

Leader::Leader(RendezvousOptions options, const net::Secret& secret,
               std::shared_ptr<Listener> listener, std::shared_ptr<Election> election,
               const RankTable& last, const Decision& decision)
    : options_(std::move(options)),
      secret_(secret),
      listener_(std::move(listener)),
      election_(std::move(election)),
      leads_(!election_),
      table_(last),
      generation_(last.generation),
      last_size_(last.num_nodes()),
      survivors_by_(Deadline::after(kSurvivorsCome)),
      num_restarts_(last.num_restarts + 1),
      gather_deadline_(Deadline::after(election_ ? options_.timeout : kQuorumComes)) {
  members_.push_back(
      {.who = options_.introduction(listener_->address().text()), .node_rank = 0, .ready = false});
  failure_ = decision.failure;
  decision_ = decision;
  if (leads_) listener_->let_in();
}

Leader::~Leader() {
  for (Member& member : members_)
    if (member.node_rank < 0) member.connection.send("refused", "the job has ended");
}

int Leader::num_in_table() const {
  return static_cast<int>(std::count_if(members_.begin(), members_.end(), [](const Member& member) {
    return member.node_rank >= 0;
  }));
}

void Leader::add_to(std::vector<pollfd>& polled) const {
  polled.push_back({listener_->fd(), POLLIN, 0});
  for (const Member& member : members_)
    if (member.connection.open()) polled.push_back({member.connection.fd(), POLLIN, 0});
}

void Leader::attend() {
  check_leadership();
  if (successor_ || (!leads_ && Clock::now() < doubtful_since_ + kEtcdAnswers)) return;
  receive_arrivals();
  hear_members();
  if (phase_ == Phase::running) consider_growth();
  if (phase_ == Phase::gathering) gather();
}

void Leader::check_leadership() {
  if (!election_ || phase_ == Phase::over || successor_) return;
  const Election::Leadership leadership = election_->status().leadership;
  if (leadership == Election::Leadership::lost) {
    step_down();
    return;
  }
  if (leads_ == (leadership == Election::Leadership::ours)) return;
  leads_ = !leads_;
  if (!leads_) doubtful_since_ = Clock::now();
  // Others learn from etcd where to go, and this launcher may not be the one that they find there.
  if (leads_)
    listener_->let_in();
  else
    listener_->turn_away("nobody");
}

// The members notice by their connections, and learn from etcd where to go.
void Leader::step_down() {
  listener_->turn_away("nobody");
  successor_ = std::make_unique<Follower>(
      options_, secret_, listener_, election_, table_, decision_,
      "it was stopped, or cut off from etcd, and another host has taken its place");
  if (own().ready && !first_rendezvous()) successor_->announce_ready();
  members_.resize(1);
  server_.reset();
}

std::unique_ptr<Peers> Leader::successor() { return std::move(successor_); }

// A survivor knows more of the job than a leader that was not part of it.
void Leader::learn_from(const Introduction& who) {
  if (!election_ || who.last_generation < 0) return;
  if (first_rendezvous()) {
    log::info("host {} is of generation {} of this job: it goes on from there", who.host,
              who.last_generation);
    survivors_by_ = Deadline::after(kSurvivorsCome);
    gather_deadline_ = Deadline::after(options_.timeout);
  }
  newest_seen_ = std::max(newest_seen_, who.last_generation);
  if (generation_ < 0) num_restarts_ = std::max(num_restarts_, who.last_restarts + 1);
}

// Why a launcher cannot be a member; empty where it can.
std::string Leader::objection(const Introduction& who) const {
  if (who.min_nodes != options_.min_nodes || who.max_nodes != options_.max_nodes)
    return fmt::format("this job has --nnodes {}, but host {} was started with --nnodes {}",
                       node_range(options_.min_nodes, options_.max_nodes), who.host,
                       node_range(who.min_nodes, who.max_nodes));
  if (who.run_id != options_.run_id)
    return fmt::format("this job has --rdzv-id '{}', but host {} was started with '{}'",
                       options_.run_id, who.host, who.run_id);
  if (who.num_ranks < 1 || who.num_ranks > kMostRanksOfAHost)
    return fmt::format("host {} wants to run {} ranks", who.host, who.num_ranks);
  // Where nodes may join later, surplus ones wait.
  if (!options_.elastic() && static_cast<int>(members_.size()) >= options_.max_nodes)
    return fmt::format("all {} nodes of this job have come already, without host {}",
                       options_.max_nodes, who.host);
  if (who.node_rank >= options_.max_nodes)
    return fmt::format("--node-rank {} of host {} is not below --nnodes {}", who.node_rank,
                       who.host, options_.max_nodes);
  // Later, it may be a node that comes back before its loss was noticed.
  if (!first_rendezvous() || options_.min_nodes < options_.max_nodes) return "";
  if (who.node_rank == 0)
    return fmt::format("host {} was started with --node-rank 0, which this host is", who.host);
  for (const Member& member : members_)
    if (who.node_rank > 0 && member.who.node_rank == who.node_rank)
      return fmt::format("hosts {} and {} were both started with --node-rank {}", member.who.host,
                         who.host, who.node_rank);
  return "";
}

void Leader::receive_arrivals() {
  for (Arrival& arrival : listener_->arrivals()) {
    learn_from(arrival.introduction);
    const std::string reason = objection(arrival.introduction);
    if (!reason.empty()) {
      log::warn("refused a launcher: {}", reason);
      arrival.connection.send("refused", reason);
      continue;
    }
    arrival.connection.send("accepted");
    if (!first_rendezvous() && num_in_table() >= options_.max_nodes)
      arrival.connection.send("waiting",
                              fmt::format("this job has all of its {} nodes: host {} waits "
                                          "to take the place of one that is lost",
                                          options_.max_nodes, arrival.introduction.host));
    const bool survivor = survivors_by_ && arrival.introduction.last_generation == generation_;
    const int node_rank = survivor ? arrival.introduction.last_node_rank : -1;
    const bool ready = arrival.introduction.ready;
    members_.push_back(
        {std::move(arrival.connection), std::move(arrival.introduction), node_rank, ready});
    last_arrival_ = Clock::now();
  }
}

void Leader::hear_members() {
  const auto now = Clock::now();
  const bool beat = now >= next_beat_;
  if (beat) next_beat_ = now + kBeat;
  for (std::size_t i = 1; i < members_.size();) {
    Member& member = members_[i];
    if (beat) member.connection.send("alive");
    while (const auto message = member.connection.receive()) handle(member, *message);
    std::string how;
    if (!member.connection.open()) {
      how = "its connection closed; it died or was killed";
    } else if (!member.paused && now - member.connection.last_heard() > kLongestSilence) {
      how = fmt::format("no word from it for {:.0f} s; is it stopped, or its network down?",
                        seconds(kLongestSilence));
    }
    if (how.empty()) {
      ++i;
      continue;
    }
    const Member lost = std::move(member);
    members_.erase(members_.begin() + static_cast<std::ptrdiff_t>(i));
    lose(lost, how);
    check_pause();
  }
}

void Leader::handle(Member& member, const Connection::Message& message) {
  if (message.word == "failure") {
    const Failure failure = Failure::decode(message.text);
    if (failure.kind == Failure::Kind::node_lost) {  // it says so of itself, and leaves the job
      member.connection.close();
      return;
    }
    if (member.node_rank >= 0) fail(failure);
  } else if (message.word == "done") {
    member.done = true;
    check_done();
  } else if (message.word == "ready") {
    member.ready = true;
  } else if (message.word == "pause" || message.word == "resume") {
    member.paused = message.word == "pause";
    check_pause();
  } else if (message.word == "confirmed") {
    member.confirmation = Member::Confirmation::given;
  }
}

void Leader::lose(const Member& member, const std::string& how) {
  if (member.node_rank < 0 || phase_ == Phase::gathering) {
    log::warn("the launcher of host {} went away again ({})", member.who.host, how);
    return;
  }
  if (member.done) return;
  fail({.kind = Failure::Kind::node_lost,
        .node_rank = member.node_rank,
        .host = member.who.host,
        .generation = generation_,
        .detail = how});
}

void Leader::announce(const Failure& failure) { fail(failure); }

void Leader::fail(const Failure& failure) {
  // This ends the job even where it is about to be formed again: other ranks may have failed
  // because of one that a restart cannot help, and have been heard of first.
  const bool for_good = failure.kind == Failure::Kind::interrupted ||
                        (failure.final && failure.generation == generation_);
  if (phase_ == Phase::over || all_done_ || (phase_ == Phase::gathering && !for_good)) return;
  // A host that lost its guardian cannot start ranks any more.
  const bool own_loss = failure.kind == Failure::Kind::node_lost && failure.node_rank == 0;
  const bool restart =
      worth_a_restart(failure) && !own_loss && num_restarts_ < options_.max_restarts;
  failure_ = failure;
  if (restart) ++num_restarts_;
  decide({restart ? Decision::Action::restart : Decision::Action::end, failure, ""});
}

void Leader::decide(Decision decision) {
  // Ranks that are still joining the generation would wait in its store for one that will not come.
  // Where they may complete a step first, they can need the store for that.
  if (decision.action == Decision::Action::restart) server_.reset();
  if (decision.action == Decision::Action::grow)
    server_until_ = Deadline::after(options_.leave_soon);
  tell_members("decision", decision.encode());
  phase_ = decision.action == Decision::Action::end ? Phase::over : Phase::gathering;
  gather_deadline_ = Deadline::after(options_.timeout);
  told_waiting_ = false;
  decision_ = std::move(decision);
}

void Leader::announce_done() {
  own().done = true;
  check_done();
}

void Leader::announce_ready() { own().ready = true; }

void Leader::check_done() {
  if (phase_ != Phase::running) return;
  for (const Member& member : members_)
    if (member.node_rank >= 0 && !member.done) return;
  all_done_ = true;
  phase_ = Phase::over;
  tell_members("end");
}

bool Leader::announce_pause() {
  if (election_) return false;
  own().paused = true;
  check_pause();
  return true;
}

void Leader::announce_resume() {
  own().paused = false;
  check_pause();
}

// The job is paused as long as the user of any host wants it.
void Leader::check_pause() {
  const bool paused = phase_ == Phase::running &&
                      std::any_of(members_.begin(), members_.end(), [](const Member& member) {
                        return member.node_rank >= 0 && member.paused;
                      });
  if (paused == paused_) return;
  paused_ = paused;
  tell_members(paused ? "pause" : "resume");
}

void Leader::tell_members(const std::string& word, const std::string& text) {
  for (Member& member : members_)
    if (member.node_rank >= 0) member.connection.send(word, text);
}

void Leader::consider_growth() {
  if (!leads_) return;  // the job could not be formed again
  const int size = num_in_table();
  const int waiting = static_cast<int>(members_.size()) - size;
  if (waiting == 0 || size >= options_.max_nodes || Clock::now() < last_arrival_ + kComeTogether)
    return;
  // A job of which some ranks are done is not formed again.
  for (const Member& member : members_)
    if (member.done) return;
  std::string hosts;
  for (const Member& member : members_)
    if (member.node_rank < 0) hosts += (hosts.empty() ? "" : ", ") + member.who.host;
  decide({Decision::Action::grow, std::nullopt,
          fmt::format("{} came to the {} node{} of this job", hosts, size, size == 1 ? "" : "s")});
}

void Leader::gather() {
  if (server_until_.passed()) server_.reset();
  const bool asked = std::exchange(asked_to_confirm_, false);
  for (const Member& member : members_) {
    if (member.ready) continue;
    if (gather_deadline_.passed())
      give_up(fmt::format("the ranks of host {} did not end within {:.1f} s", member.who.host,
                          gather_deadline_.span_seconds()));
    return;
  }
  if (survivors_may_come()) return;
  if (!has_quorum()) {
    give_up(fmt::format("only {} of the {} nodes of this job are left, not more than half: the "
                        "others may go on without them",
                        num_in_table(), last_size_));
    return;
  }
  const int size = static_cast<int>(members_.size());
  const bool enough = size >= options_.min_nodes &&
                      (!first_rendezvous() || Clock::now() >= last_arrival_ + options_.last_call);
  if (enough || size >= options_.max_nodes) {
    if (may_form(asked)) form();
    return;
  }
  if (gather_deadline_.passed()) {
    std::string missing = missing_nodes();
    if (options_.min_nodes < options_.max_nodes)
      missing = fmt::format("{} of at least", options_.min_nodes - size);
    give_up(fmt::format("{} {} did not come within {:.1f} s", missing,
                        options_.min_nodes < options_.max_nodes
                            ? fmt::format("{} nodes", options_.min_nodes)
                            : fmt::format("of {}", options_.min_nodes),
                        gather_deadline_.span_seconds()));
  } else if (!first_rendezvous() && !told_waiting_) {
    say_who_is_missing(size);
  }
}

// Nobody should have to guess why the job waits.
void Leader::say_who_is_missing(int size) {
  told_waiting_ = true;
  const std::string text =
      fmt::format("the job needs {} nodes and {} left; waiting up to {:.0f} s for more at {}",
                  options_.min_nodes, size == 1 ? "1 is" : fmt::format("{} are", size),
                  gather_deadline_.span_seconds(), listener_->address().text());
  log::warn("{}", text);
  tell_members("waiting", text);
}

// "node rank 2" or "node ranks 1 and 3"; "2 of the node ranks 1-3" where nobody claimed one. Empty
// where nobody is missing.
std::string Leader::missing_nodes() const {
  if (static_cast<int>(members_.size()) >= options_.min_nodes) return "";
  const std::size_t missing = static_cast<std::size_t>(options_.min_nodes) - members_.size();
  std::set<int> claimed{0};
  for (const Member& member : members_) claimed.insert(member.who.node_rank);
  std::vector<int> free;
  for (int node = 1; node < options_.min_nodes; ++node)
    if (!claimed.contains(node)) free.push_back(node);
  // A member that claimed no rank could take any of the free ones.
  if (free.size() == missing) return "node " + list_ranks(free);
  return fmt::format("{} of the node {}", missing, list_ranks(free));
}

// Whether the job may be formed now. `asked`: etcd or the survivors have been asked to confirm
// that, and nothing has changed since; an older answer does not count.
bool Leader::may_form(bool asked) {
  asked_to_confirm_ = true;
  if (!election_) return !survivors_by_ || survivors_confirm(asked);
  if (!asked) election_->confirm(next_generation());
  if (leads_ && election_->confirmed() == next_generation()) return true;
  if (gather_deadline_.passed())
    give_up(fmt::format("etcd at {} did not confirm within {:.1f} s that this host is still node 0",
                        election_->where(), gather_deadline_.span_seconds()));
  return false;
}

// Survivors that do not answer are lost by their silence.
bool Leader::survivors_confirm(bool asked) {
  bool all = true;
  for (std::size_t i = 1; i < members_.size(); ++i) {
    Member& member = members_[i];
    if (member.node_rank < 0) continue;
    if (!asked) member.confirmation = Member::Confirmation::not_asked;
    if (member.confirmation == Member::Confirmation::not_asked) {
      member.connection.send("confirm");
      member.confirmation = Member::Confirmation::asked;
    }
    all &= member.confirmation == Member::Confirmation::given;
  }
  return all;
}

// Whether to wait for more survivors: until all but the lost leader have come, or until enough have
// and the others have had their time.
bool Leader::survivors_may_come() const {
  if (!survivors_by_ || (last_size_ > 0 && num_in_table() >= last_size_ - 1)) return false;
  return has_quorum() ? !survivors_by_->passed() : !gather_deadline_.passed();
}

bool Leader::has_quorum() const {
  if (first_rendezvous() || election_) return true;
  return survivors_by_ ? 2 * num_in_table() > last_size_ : 2 * num_in_table() >= last_size_;
}

// Gives every member of the next rank table its node rank, and sorts the members by it; members
// over `max_nodes` are left without. With a fixed number of nodes everybody keeps its rank, and a
// new member gets the one that it claims or a free one; otherwise ranks move up, and a new member
// gets the next.
void Leader::number_members() {
  own().node_rank = 0;
  if (options_.min_nodes == options_.max_nodes) {
    std::set<int> taken;
    for (const Member& member : members_)
      if (member.node_rank >= 0) taken.insert(member.node_rank);
    for (Member& member : members_) {
      const int claimed = member.who.node_rank;
      if (member.node_rank < 0 && claimed >= 0 && claimed < options_.max_nodes &&
          taken.insert(claimed).second)
        member.node_rank = claimed;
    }
    int next = 1;
    for (Member& member : members_) {
      while (taken.contains(next)) ++next;
      if (member.node_rank >= 0 || next >= options_.max_nodes) continue;
      member.node_rank = next;
      taken.insert(next);
    }
  }
  // Members without a rank come after all others.
  const auto place = [](int rank) { return rank < 0 ? 1 << 30 : rank; };
  std::stable_sort(members_.begin(), members_.end(), [&](const Member& a, const Member& b) {
    if (a.node_rank >= 0 || b.node_rank >= 0) return place(a.node_rank) < place(b.node_rank);
    return place(a.who.node_rank) < place(b.who.node_rank);
  });
  for (std::size_t i = 0; i < members_.size(); ++i)
    members_[i].node_rank = static_cast<int>(i) < options_.max_nodes ? static_cast<int>(i) : -1;
}

void Leader::form() {
  number_members();
  // With several nodes, this launcher's host is node 0.
  RankTable table{
      .master_addr = options_.max_nodes == 1 ? options_.master_addr : listener_->address().host,
      .generation = next_generation(),
      .num_restarts = num_restarts_,
      .max_restarts = options_.max_restarts};
  for (const Member& member : members_)
    if (member.node_rank >= 0)
      table.nodes.push_back({member.who.host, member.who.num_ranks, member.who.address});
  generation_ = table.generation;
  last_size_ = table.num_nodes();
  server_.reset();
  server_until_ = Deadline::never();
  server_ = std::make_unique<store::Server>(net::Address{listener_->address().host, 0}, secret_,
                                            store::kStoreCapacityBytes,
                                            static_cast<std::uint32_t>(generation_));
  table.store = server_->address().text();
  table.master_port =
      options_.master_port != 0 ? options_.master_port : net::free_port(table.master_addr);
  for (Member& member : members_) {
    if (member.node_rank < 0) continue;
    member.ready = false;
    member.done = false;
    member.paused = false;
    table.node_rank = member.node_rank;
    if (member.node_rank > 0) member.connection.send("layout", table.encode());
  }
  table.node_rank = 0;
  table_ = table;
  asked_to_confirm_ = false;
  survivors_by_.reset();
  phase_ = Phase::running;
  begin(table);
}

void Leader::give_up(const std::string& why) {
  if (!first_rendezvous()) {
    failure_ = Failure{.kind = Failure::Kind::too_few,
                       .host = own().who.host,
                       .generation = generation_,
                       .detail = fmt::format("the job could not be formed anew: {}", why)};
    decide({Decision::Action::end, failure_, ""});
    return;
  }
  for (Member& member : members_) member.connection.send("refused", why);
  std::string advice = "Start 'lockstep run' on every host with the same --nnodes and "
                       "--rdzv-endpoint (or --master-addr and --master-port), or raise --timeout.";
  const std::string& host = listener_->address().host;
  if (is_loopback(host))
    advice += fmt::format(" '{}' is a loopback address, which other hosts cannot reach: give an "
                          "address of this host on their network.",
                          host);
  fail_rendezvous(Fault::timeout, fmt::format("{}; this is node 0, at {}. {}", why,
                                              listener_->address().text(), advice));
}

}  // namespace lockstep::launch
