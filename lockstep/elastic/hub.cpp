#include <lockstep/elastic/hub.h>

#include <netinet/in.h>

#include <algorithm>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/elastic/free_port.h>
#include <lockstep/elastic/member.h>

namespace lockstep::elastic {

namespace {

// Nodes that come together make the job be formed anew once, not once each.
constexpr milliseconds kComeTogether(1000);

// After taking over: how long those that are left have to come before the job goes on without them,
// and how long to wait for more than half.
constexpr milliseconds kFellowsCome(3000);
constexpr milliseconds kQuorumComes(6000);

// For etcd to say whether this is still the hub, before others are taken for lost: they may have
// gone to the next.
constexpr milliseconds kWordOfEtcd(1000);

double seconds(milliseconds span) { return std::chrono::duration<double>(span).count(); }

bool is_loopback(const std::string& host) {
  const net::SocketAddress first = net::resolve({host, 0}).front();
  if (first.get()->sa_family == AF_INET6)
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(first.get())->sin6_addr);
  const auto* address = reinterpret_cast<const sockaddr_in*>(first.get());
  return ntohl(address->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

}  // namespace

Hub::Hub(MeetingOptions options, const net::Secret& secret, std::shared_ptr<Door> door,
         std::shared_ptr<Election> election)
    : options_(std::move(options)),
      secret_(secret),
      door_(std::move(door)),
      election_(std::move(election)),
      in_office_(!election_),
      gather_deadline_(Deadline::after(options_.timeout)),
      last_arrival_(Clock::now()),
      next_beat_(Clock::now()) {
  seats_.push_back({.who = introduce(options_, door_->address().text()), .node_rank = 0});
  if (options_.max_nodes > 1)
    log::info("this is node 0, waiting at {} for {} more", door_->address().text(),
              node_range(options_.min_nodes - 1, options_.max_nodes - 1));
}

Hub::Hub(MeetingOptions options, const net::Secret& secret, std::shared_ptr<Door> door,
         std::shared_ptr<Election> election, const Layout& last, const Decision& decision)
    : options_(std::move(options)),
      secret_(secret),
      door_(std::move(door)),
      election_(std::move(election)),
      in_office_(!election_),
      layout_(last),
      generation_(last.generation),
      last_size_(last.num_nodes()),
      fellows_by_(Deadline::after(kFellowsCome)),
      num_restarts_(last.num_restarts + 1),
      gather_deadline_(Deadline::after(election_ ? options_.timeout : kQuorumComes)),
      last_arrival_(Clock::now()),
      next_beat_(Clock::now()) {
  seats_.push_back(
      {.who = introduce(options_, door_->address().text()), .node_rank = 0, .ready = false});
  failure_ = decision.failure;
  decision_ = decision;
  if (in_office_) door_->send_away("", "");
}

Hub::~Hub() {
  for (Seat& seat : seats_)
    if (seat.node_rank < 0) seat.channel.send("refused", "the job has ended");
}

int Hub::num_members() const {
  return static_cast<int>(std::count_if(seats_.begin(), seats_.end(),
                                        [](const Seat& seat) { return seat.node_rank >= 0; }));
}

void Hub::add_to(std::vector<pollfd>& polled) const {
  polled.push_back({door_->fd(), POLLIN, 0});
  for (const Seat& seat : seats_)
    if (seat.channel.open()) polled.push_back({seat.channel.fd(), POLLIN, 0});
}

void Hub::attend() {
  check_office();
  if (successor_ || (!in_office_ && Clock::now() < doubtful_since_ + kWordOfEtcd)) return;
  receive_arrivals();
  hear_seats();
  if (phase_ == Phase::running) consider_growth();
  if (phase_ == Phase::gathering) gather();
}

void Hub::check_office() {
  if (!election_ || phase_ == Phase::over || successor_) return;
  const Election::Office office = election_->standing().office;
  if (office == Election::Office::lost) {
    step_down();
    return;
  }
  if (in_office_ == (office == Election::Office::ours)) return;
  in_office_ = !in_office_;
  if (!in_office_) doubtful_since_ = Clock::now();
  // Others learn from etcd where to go, and would not find this one there.
  door_->send_away(in_office_ ? "" : "nobody", "");
}

// The members find out by their connections, and where to go from etcd.
void Hub::step_down() {
  door_->send_away("nobody", "");
  successor_ = std::make_unique<Member>(
      options_, secret_, door_, election_, layout_, decision_,
      "it was stopped, or cut off from etcd, and another host has taken its place");
  if (own().ready && !first_meeting()) successor_->announce_ready();
  seats_.resize(1);
  server_.reset();
}

std::unique_ptr<Peers> Hub::successor() { return std::move(successor_); }

// Those who were of the job know more of it than a hub that was not.
void Hub::learn_from(const Introduction& who) {
  if (!election_ || who.last_generation < 0) return;
  if (first_meeting()) {
    log::info("host {} is of generation {} of this job: it goes on from there", who.host,
              who.last_generation);
    fellows_by_ = Deadline::after(kFellowsCome);
    gather_deadline_ = Deadline::after(options_.timeout);
  }
  newest_seen_ = std::max(newest_seen_, who.last_generation);
  if (generation_ < 0) num_restarts_ = std::max(num_restarts_, who.last_restarts + 1);
}

void Hub::receive_arrivals() {
  for (Arrival& arrival : door_->arrivals()) {
    learn_from(arrival.introduction);
    const std::string reason = objection(arrival.introduction, options_, seats_,
                                         first_meeting() ? Meeting::first : Meeting::later);
    if (!reason.empty()) {
      log::warn("refused a launcher: {}", reason);
      arrival.channel.send("refused", reason);
      continue;
    }
    arrival.channel.send("welcome");
    if (!first_meeting() && num_members() >= options_.max_nodes)
      arrival.channel.send("waiting", fmt::format("this job has all of its {} nodes: host {} waits "
                                                  "to take the place of one that is lost",
                                                  options_.max_nodes, arrival.introduction.host));
    const bool fellow = fellows_by_ && arrival.introduction.last_generation == generation_;
    const int node_rank = fellow ? arrival.introduction.last_node_rank : -1;
    const bool ready = arrival.introduction.ready;
    seats_.push_back(
        {std::move(arrival.channel), std::move(arrival.introduction), node_rank, ready});
    last_arrival_ = Clock::now();
  }
}

void Hub::hear_seats() {
  const auto now = Clock::now();
  const bool beat = now >= next_beat_;
  if (beat) next_beat_ = now + kBeat;
  std::vector<std::pair<Introduction, std::string>> waited;
  for (std::size_t i = 1; i < seats_.size();) {
    Seat& seat = seats_[i];
    if (beat) seat.channel.send("alive");
    while (const auto message = seat.channel.receive()) hear(seat, *message);
    std::string how;
    if (!seat.channel.open()) {
      how = "its connection closed; it died or was killed";
    } else if (!seat.paused && now - seat.channel.last_heard() > kLongestSilence) {
      how = fmt::format("no word from it for {:.0f} s; is it stopped, or its network down?",
                        seconds(kLongestSilence));
    }
    if (how.empty()) {
      ++i;
      continue;
    }
    const Seat lost = std::move(seat);
    seats_.erase(seats_.begin() + static_cast<std::ptrdiff_t>(i));
    lose(lost, how);
    check_pause();
  }
}

void Hub::hear(Seat& seat, const Channel::Message& message) {
  if (message.word == "failure") {
    const Failure failure = Failure::decode(message.text);
    if (failure.kind == Failure::Kind::node_lost) {  // it says so of itself, and leaves
      seat.channel.close();
      return;
    }
    if (seat.node_rank >= 0) fail(failure);
  } else if (message.word == "done") {
    seat.done = true;
    check_done();
  } else if (message.word == "ready") {
    seat.ready = true;
  } else if (message.word == "pause" || message.word == "resume") {
    seat.paused = message.word == "pause";
    check_pause();
  } else if (message.word == "confirmed") {
    seat.word = Seat::Word::given;
  }
}

void Hub::lose(const Seat& seat, const std::string& how) {
  if (seat.node_rank < 0 || phase_ == Phase::gathering) {
    log::warn("the launcher of host {} went away again ({})", seat.who.host, how);
    return;
  }
  if (seat.done) return;
  fail({.kind = Failure::Kind::node_lost,
        .node_rank = seat.node_rank,
        .host = seat.who.host,
        .generation = generation_,
        .detail = how});
}

void Hub::announce(const Failure& failure) { fail(failure); }

void Hub::fail(const Failure& failure) {
  // Also where the job was about to be formed anew: of a rank that cannot be helped others may have
  // died, and been heard of first.
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

void Hub::decide(Decision decision) {
  // Ranks that are on their way into the generation wait there for one that will not come. Those
  // that may complete a step can need it for that.
  if (decision.action == Decision::Action::restart) server_.reset();
  if (decision.action == Decision::Action::grow)
    server_until_ = Deadline::after(options_.leave_soon);
  tell_members("decision", decision.encode());
  phase_ = decision.action == Decision::Action::end ? Phase::over : Phase::gathering;
  gather_deadline_ = Deadline::after(options_.timeout);
  told_waiting_ = false;
  decision_ = std::move(decision);
}

void Hub::announce_done() {
  own().done = true;
  check_done();
}

void Hub::announce_ready() { own().ready = true; }

void Hub::check_done() {
  if (phase_ != Phase::running) return;
  for (const Seat& seat : seats_)
    if (seat.node_rank >= 0 && !seat.done) return;
  all_done_ = true;
  phase_ = Phase::over;
  tell_members("end", "");
}

bool Hub::announce_pause() {
  if (election_) return false;
  own().paused = true;
  check_pause();
  return true;
}

void Hub::announce_resume() {
  own().paused = false;
  check_pause();
}

// As long as the users of several hosts want it, the job stands still for all of them.
void Hub::check_pause() {
  const bool paused =
      phase_ == Phase::running && std::any_of(seats_.begin(), seats_.end(), [](const Seat& seat) {
        return seat.node_rank >= 0 && seat.paused;
      });
  if (paused == paused_) return;
  paused_ = paused;
  tell_members(paused ? "pause" : "resume", "");
}

void Hub::tell_members(const std::string& word, const std::string& text) {
  for (Seat& seat : seats_)
    if (seat.node_rank >= 0) seat.channel.send(word, text);
}

void Hub::consider_growth() {
  if (!in_office_) return;  // the job could not be formed anew
  const int size = num_members();
  const int waiting = static_cast<int>(seats_.size()) - size;
  if (waiting == 0 || size >= options_.max_nodes || Clock::now() < last_arrival_ + kComeTogether)
    return;
  // Work that is nearly complete is not begun anew.
  for (const Seat& seat : seats_)
    if (seat.done) return;
  std::string hosts;
  for (const Seat& seat : seats_)
    if (seat.node_rank < 0) hosts += (hosts.empty() ? "" : ", ") + seat.who.host;
  decide({Decision::Action::grow, std::nullopt,
          fmt::format("{} came to the {} node{} of this job", hosts, size, size == 1 ? "" : "s")});
}

void Hub::gather() {
  if (server_until_.passed()) server_.reset();
  const bool asked = std::exchange(asked_to_confirm_, false);
  for (const Seat& seat : seats_) {
    if (seat.ready) continue;
    if (gather_deadline_.passed())
      give_up(fmt::format("the ranks of host {} did not end within {:.1f} s", seat.who.host,
                          gather_deadline_.span_seconds()));
    return;
  }
  if (fellows_may_come()) return;
  if (!has_quorum()) {
    give_up(fmt::format("only {} of the {} nodes of this job are left, not more than half: the "
                        "others may go on without them",
                        num_members(), last_size_));
    return;
  }
  const int size = static_cast<int>(seats_.size());
  const bool enough = size >= options_.min_nodes &&
                      (!first_meeting() || Clock::now() >= last_arrival_ + options_.last_call);
  if (enough || size >= options_.max_nodes) {
    if (may_form(asked)) form();
    return;
  }
  if (gather_deadline_.passed()) {
    std::string missing = missing_nodes(seats_, options_.min_nodes);
    if (options_.min_nodes < options_.max_nodes)
      missing = fmt::format("{} of at least", options_.min_nodes - size);
    give_up(fmt::format("{} {} did not come within {:.1f} s", missing,
                        options_.min_nodes < options_.max_nodes
                            ? fmt::format("{} nodes", options_.min_nodes)
                            : fmt::format("of {}", options_.min_nodes),
                        gather_deadline_.span_seconds()));
  } else if (!first_meeting() && !told_waiting_) {
    say_who_is_missing(size);
  }
}

// The ranks of a job wait for more nodes: nobody should have to guess.
void Hub::say_who_is_missing(int size) {
  told_waiting_ = true;
  const std::string text =
      fmt::format("the job needs {} nodes and {} left; waiting up to {:.0f} s for more at {}",
                  options_.min_nodes, size == 1 ? "1 is" : fmt::format("{} are", size),
                  gather_deadline_.span_seconds(), door_->address().text());
  log::warn("{}", text);
  tell_members("waiting", text);
}

// `asked`: somebody has been asked to confirm it, and nothing has changed since. What was said
// before that does not count.
bool Hub::may_form(bool asked) {
  asked_to_confirm_ = true;
  if (!election_) return !fellows_by_ || fellows_confirm(asked);
  if (!asked) election_->confirm(next_generation());
  if (in_office_ && election_->confirmed() == next_generation()) return true;
  if (gather_deadline_.passed())
    give_up(fmt::format("etcd at {} did not confirm within {:.1f} s that this host is still node 0",
                        election_->where(), gather_deadline_.span_seconds()));
  return false;
}

// Those that do not answer are lost by their silence.
bool Hub::fellows_confirm(bool asked) {
  bool all = true;
  for (std::size_t i = 1; i < seats_.size(); ++i) {
    Seat& seat = seats_[i];
    if (seat.node_rank < 0) continue;
    if (!asked) seat.word = Seat::Word::not_asked;
    if (seat.word == Seat::Word::not_asked) {
      seat.channel.send("confirm");
      seat.word = Seat::Word::asked;
    }
    all &= seat.word == Seat::Word::given;
  }
  return all;
}

// All but the hub that is lost, where they are known; or enough of them, when the others have had
// their time.
bool Hub::fellows_may_come() const {
  if (!fellows_by_ || (last_size_ > 0 && num_members() >= last_size_ - 1)) return false;
  return has_quorum() ? !fellows_by_->passed() : !gather_deadline_.passed();
}

bool Hub::has_quorum() const {
  if (first_meeting() || election_) return true;
  return fellows_by_ ? 2 * num_members() > last_size_ : 2 * num_members() >= last_size_;
}

void Hub::form() {
  number_seats(seats_, options_);
  // Of several nodes, node 0 is wherever this launcher is.
  Layout layout{
      .master_addr = options_.max_nodes == 1 ? options_.master_addr : door_->address().host,
      .generation = next_generation(),
      .num_restarts = num_restarts_,
      .max_restarts = options_.max_restarts};
  for (const Seat& seat : seats_)
    if (seat.node_rank >= 0)
      layout.nodes.push_back({seat.who.host, seat.who.num_ranks, seat.who.address});
  generation_ = layout.generation;
  last_size_ = layout.num_nodes();
  server_.reset();
  server_until_ = Deadline::never();
  server_ = std::make_unique<store::Server>(net::Address{door_->address().host, 0}, secret_,
                                            store::kStoreCapacityBytes,
                                            static_cast<std::uint32_t>(generation_));
  layout.store = server_->address().text();
  layout.master_port =
      options_.master_port != 0 ? options_.master_port : free_port(layout.master_addr);
  for (Seat& seat : seats_) {
    if (seat.node_rank < 0) continue;
    seat.ready = false;
    seat.done = false;
    seat.paused = false;
    layout.node_rank = seat.node_rank;
    if (seat.node_rank > 0) seat.channel.send("layout", layout.encode());
  }
  layout.node_rank = 0;
  layout_ = layout;
  asked_to_confirm_ = false;
  fellows_by_.reset();
  phase_ = Phase::running;
  begin(layout);
}

void Hub::give_up(const std::string& why) {
  if (!first_meeting()) {
    failure_ = Failure{.kind = Failure::Kind::too_few,
                       .host = own().who.host,
                       .generation = generation_,
                       .detail = fmt::format("the job could not be formed anew: {}", why)};
    decide({Decision::Action::end, failure_, ""});
    return;
  }
  for (Seat& seat : seats_) seat.channel.send("refused", why);
  std::string advice = "Start 'lockstep run' on every host with the same --nnodes and "
                       "--rdzv-endpoint (or --master-addr and --master-port), or raise --timeout.";
  const std::string& host = door_->address().host;
  if (is_loopback(host))
    advice += fmt::format(" '{}' is a loopback address, which other hosts cannot reach: give an "
                          "address of this host on their network.",
                          host);
  throw CommError({.fault = Fault::timeout,
                   .operation = "meeting of the launchers",
                   .explanation = fmt::format("{}; this is node 0, at {}. {}", why,
                                              door_->address().text(), advice)});
}

}  // namespace lockstep::elastic
