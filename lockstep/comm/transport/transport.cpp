#include <lockstep/comm/transport/transport.h>

#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <set>
#include <thread>

#include <spdlog/fmt/ranges.h>

#include <lockstep/net/socket.h>

namespace lockstep::comm {

namespace {

// Memory up to this size is kept between calls, so that small calls need not ask for it again.
constexpr std::size_t kMostKept = 64u << 10;

}  // namespace

std::span<std::byte> Scratch::take(std::size_t bytes) {
  if (num_taken_ == pieces_.size()) pieces_.emplace_back();
  Piece& piece = pieces_[num_taken_];
  if (piece.bytes < bytes) {
    piece.memory = std::make_unique_for_overwrite<std::byte[]>(bytes);
    piece.bytes = bytes;
  }
  ++num_taken_;
  return {piece.memory.get(), bytes};
}

void Scratch::shrink() {
  num_taken_ = 0;
  if (pieces_.size() > 1) pieces_.resize(1);
  if (!pieces_.empty() && pieces_.front().bytes > kMostKept) pieces_.clear();
}

namespace {

// A rank that is gone may have done its part of this call before it went, so the others get this
// long to finish without it.
constexpr milliseconds kGraceForTheDead(100);
// How often a broken connection is looked at.
constexpr milliseconds kRepairInterval(20);
constexpr milliseconds kLongestSleep(1000);
// How long it may take to mend a connection that nobody waits for.
constexpr milliseconds kLookTime(5000);
// How long a rank that fails tries to tell the others why. A peer that reads takes the notice at
// once; a peer that has to wait for a core, with half a message written before the notice, may take
// a while.
constexpr milliseconds kNoticeTime(500);
// How long a rank may take to answer whether it is alive, and the largest group in which all ranks
// are asked.
constexpr milliseconds kAskTime(500);
constexpr int kMostAsked = 64;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

int Topology::num_hosts() const {
  return host_of.empty() ? 0 : *std::max_element(host_of.begin(), host_of.end()) + 1;
}

std::vector<int> Topology::ranks_on(int host) const {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < host_of.size(); ++rank)
    if (host_of[rank] == host) ranks.push_back(static_cast<int>(rank));
  return ranks;
}

Transport::Transport(Settings settings, std::vector<std::unique_ptr<Link>> links,
                     std::shared_ptr<SharedHeap> heap)
    : settings_(std::move(settings)),
      links_(std::move(links)),
      heap_(std::move(heap)),
      interrupt_event_(net::make_event()),
      states_(links_.size(), PeerState::alive) {
  LOCKSTEP_CHECK(settings_.topology.host_of.size() == links_.size());
  for (const auto& link : links_)
    if (link) LOCKSTEP_CHECK(link->longest_view() >= settings_.longest_view);
}

Transport::~Transport() {
  heap_->set_announce(nullptr);
  if (failed_) return;
  const Deadline deadline = Deadline::after(std::chrono::seconds(2));
  for (const auto& link : links_)
    if (link) link->send_goodbye(deadline);
}

std::string Transport::kind() const {
  std::set<std::string> kinds;
  for (const auto& link : links_)
    if (link != nullptr) kinds.insert(link->kind());
  // A group of one has no links, and its only rank is on this host.
  return kinds.empty() ? "shm" : fmt::format("{}", fmt::join(kinds, "+"));
}

std::vector<std::uint64_t> Transport::sent_bytes() const {
  std::vector<std::uint64_t> bytes;
  for (const auto& link : links_) bytes.push_back(link ? link->sent_bytes() : 0);
  return bytes;
}

void Transport::begin(const Fingerprint& call, Deadline deadline) {
  call_ = call;
  deadline_ = deadline;
  if (call.operation != Operation::exchange) settings_.mailbox->set_sequence(call.sequence);
  // A rank that comes late may find all messages that it waits for in its buffers, and must still
  // not go on in a group that is over.
  for (const auto& link : links_) {
    if (!link) continue;
    link->begin_call();
    if (link->state() == PeerState::aborted) {
      failed_ = true;
      throw link->notice().error(settings_.group, settings_.rank);
    }
  }
}

void Transport::end() {
  for (const auto& link : links_)
    if (link) wait([&link] { return link->idle(); }, link->peer());
  for (const auto& link : links_)
    if (link) link->end_call();
  scratch_.reuse();
}

void Transport::abandon() noexcept {
  failed_ = true;
  for (const auto& link : links_)
    if (link) link->abandon_call();
}

void Transport::wait_received(int peer) {
  wait([this, peer] { return link(peer).receives_done(); }, peer);
}

View Transport::view(int peer, std::size_t bytes) {
  LOCKSTEP_CHECK(bytes <= longest_view(), "{} bytes cannot be viewed", bytes);
  Link& from = link(peer);
  std::optional<View> found;
  guard([&] { found = from.try_view(call_, bytes); });
  if (found) return *found;
  from.set_view_wanted(true);
  wait([&] { return (found = from.try_view(call_, bytes)).has_value(); }, peer);
  from.set_view_wanted(false);
  return *found;
}

void Transport::progress_all() {
  for (const auto& link : links_)
    if (link && !link->idle()) link->progress();
}

template <typename Ready>
void Transport::wait_until(Ready ready, int peer) {
  if (ready()) return;
  // Most waits are over before reading the clock would pay.
  std::optional<Clock::time_point> spin_until;
  for (unsigned turn = 1; settings_.spin.count() != 0; ++turn) {
    progress_all();
    if (ready()) return;
    relax();
    if (turn % 64 != 0) continue;
    const auto now = Clock::now();
    if (!spin_until) spin_until = now + settings_.spin;
    if (now >= *spin_until) break;
  }
  // Looks at peers before each sleep: the bytes that would wake us may have arrived, and been read,
  // while an earlier call waited for something else. Messages of a peer that has gone still count.
  while (true) {
    if (!look_at_peers()) {
      progress_all();
      if (ready()) return;
      check_peers(peer);
    }
    if (deadline_.passed()) timed_out(peer);
    sleep(kLongestSleep);
    progress_all();
    if (ready()) return;
  }
}

// Sleeps until a peer rings, a socket has an event, a thread interrupts, or it is time to check the
// deadline again.
void Transport::sleep(milliseconds longest) {
  std::vector<pollfd> descriptors;
  std::vector<Link*> owners;
  descriptors.push_back({interrupt_event_.get(), POLLIN, 0});
  descriptors.push_back({settings_.mailbox->event(), POLLIN, 0});
  owners.resize(descriptors.size());
  bool quiet = true;
  bool broken = false;
  for (const auto& link : links_) {
    if (!link) continue;
    if (link->state() == PeerState::broken) broken = true;
    if (!link->arm()) quiet = false;
    const short events = link->wanted_events();
    if (events == 0) continue;
    descriptors.push_back({link->descriptor(), events, 0});
    owners.push_back(link.get());
  }
  if (broken || death_seen_) longest = std::min(longest, kRepairInterval);
  int timeout = deadline_.poll_timeout(longest);
  if (!quiet) timeout = 0;
  const int ready = ::poll(descriptors.data(), descriptors.size(), timeout);
  for (const auto& link : links_)
    if (link) link->disarm();
  if (ready <= 0) return;
  for (std::size_t i = 0; i < descriptors.size(); ++i)
    if (descriptors[i].revents != 0 && owners[i] != nullptr)
      owners[i]->woken(descriptors[i].revents);
  if (descriptors[1].revents != 0)
    for (const auto& link : links_)
      if (link) link->take_connection();
}

void Transport::look(const Fingerprint& call) {
  call_ = call;
  deadline_ = Deadline::after(kLookTime);
  guard([&] {
    sleep(milliseconds(0));
    for (const auto& link : links_)
      if (link) link->progress();
    if (!look_at_peers()) check_peers(/*awaited_peer=*/-1);
  });
}

// False if a peer has ended or failed, or if this rank was interrupted.
bool Transport::look_at_peers() {
  bool well = !interrupted_.load(std::memory_order_acquire);
  for (const auto& link : links_) {
    if (!link) continue;
    if (link->state() == PeerState::broken) link->repair(deadline_);
    PeerState& state = states_[static_cast<std::size_t>(link->peer())];
    state = link->state();
    well = well && (state == PeerState::alive || state == PeerState::broken);
  }
  return well;
}

void Transport::check_peers(int awaited_peer) {
  if (interrupted_.load(std::memory_order_acquire)) {
    const std::lock_guard lock(interrupt_mutex_);
    failed_ = true;
    throw interrupt_notice_->error(settings_.group, settings_.rank);
  }
  std::vector<int> dead;
  for (const auto& link : links_) {
    if (!link) continue;
    switch (states_[static_cast<std::size_t>(link->peer())]) {
      case PeerState::alive:
      case PeerState::broken: break;
      case PeerState::aborted:
        failed_ = true;
        throw link->notice().error(settings_.group, settings_.rank);
      case PeerState::closed:
        if (link->peer() == awaited_peer)
          fail({.fault = Fault::peer_lost,
                .ranks = {awaited_peer},
                .explanation = fmt::format("Rank {} has left the group in good order without "
                                           "making this call.",
                                           awaited_peer)});
        break;
      case PeerState::dead: dead.push_back(link->peer()); break;
    }
  }
  if (dead.empty()) return;
  // Blames the ranks that were seen to end first: others may have ended because of them.
  if (!death_seen_) {
    death_seen_ = Clock::now();
    first_dead_ = dead;
  }
  const bool awaited = std::find(dead.begin(), dead.end(), awaited_peer) != dead.end();
  if (awaited || Clock::now() - *death_seen_ >= kGraceForTheDead)
    fail({.fault = Fault::peer_lost,
          .ranks = first_dead_,
          .explanation =
              first_dead_.size() == 1 ? "Its process is gone." : "Their processes are gone."});
}

void Transport::fail(CommError::Details details) {
  failed_ = true;
  if (details.operation.empty()) details.operation = name(call_.operation);
  if (details.sequence == 0) details.sequence = call_.sequence;
  details.group = settings_.group;
  throw CommError(std::move(details));
}

// The rank that we wait for may itself wait for another. So every rank is asked: one that does not
// answer is stopped or cut off, one that has not come to this call is behind.
void Transport::timed_out(int awaited_peer) {
  std::vector<int> waited_for;
  for (const auto& link : links_)
    if (link && (link->peer() == awaited_peer || !link->idle())) waited_for.push_back(link->peer());
  std::vector<std::optional<Endpoint::Answer>> answers(links_.size());
  std::vector<char> gone(links_.size(), 0);  // ended by themselves, perhaps for the same reason
  std::vector<int> asked = waited_for;
  if (size() <= kMostAsked) {
    asked.clear();
    for (const auto& link : links_)
      if (link) asked.push_back(link->peer());
  }
  {
    std::vector<std::jthread> askers;
    askers.reserve(asked.size());
    for (const int peer : asked) {
      askers.emplace_back([this, peer, &answers, &gone] {
        const auto at = static_cast<std::size_t>(peer);
        try {
          answers[at] = settings_.ask(peer, Deadline::after(kAskTime));
        } catch (const CommError& error) {
          gone[at] = error.fault() == Fault::peer_lost;
        }
      });
    }
  }
  std::vector<int> silent;
  std::vector<int> behind;
  for (const int peer : asked) {
    const auto& answer = answers[static_cast<std::size_t>(peer)];
    if (!answer) {
      if (gone[static_cast<std::size_t>(peer)] == 0) silent.push_back(peer);
    } else if (answer->notice) {
      failed_ = true;
      throw answer->notice->error(settings_.group, settings_.rank);
    } else if (answer->sequence < call_.sequence && call_.operation != Operation::exchange) {
      behind.push_back(peer);
    }
  }
  std::string text = fmt::format("Rank {} waited {:.1f} s in {} for {}.", settings_.rank,
                                 deadline_.span_seconds(), call_.text(), list_ranks(waited_for));
  if (!silent.empty())
    text += fmt::format(" No answer from {}: stopped, or unreachable.", list_ranks(silent));
  if (!behind.empty()) text += fmt::format(" Not yet in this call: {}.", list_ranks(behind));
  std::vector<int> missing = silent;
  missing.insert(missing.end(), behind.begin(), behind.end());
  std::sort(missing.begin(), missing.end());
  fail({.fault = Fault::timeout,
        .ranks = missing.empty() ? waited_for : missing,
        .explanation = text});
}

void Transport::tell(const Notice& notice) {
  failed_ = true;
  for (const auto& link : links_)
    if (link) link->send_notice(notice);
  // This process may end as soon as we return, which would lose notices on their way out.
  const Deadline soon = Deadline::after(kNoticeTime);
  for (const auto& link : links_)
    if (link) link->finish_notice(soon);
}

void Transport::interrupt(const Notice& notice) {
  {
    const std::lock_guard lock(interrupt_mutex_);
    if (interrupt_notice_) return;
    interrupt_notice_ = notice;
  }
  interrupted_.store(true, std::memory_order_release);
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(interrupt_event_.get(), &one, sizeof(one));
}

}  // namespace lockstep::comm
