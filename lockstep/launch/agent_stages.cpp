// How a generation comes to its end on this host, stage by stage.
#include <signal.h>

#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/launch/agent.h>

namespace lockstep::launch {

namespace {

// After a wait this long, the log tells the user what it is for.
constexpr milliseconds kSilentWait(1000);
// The same where the log has told the user that ranks save their state.
constexpr milliseconds kSilentSave(10'000);

}  // namespace

// The end of the message that tells of a failed rank: what becomes of the others of this host.
const char* Agent::ending_the_others(const Failure& failure) const {
  const auto is_other = [&](const RankProcess& one) {
    return one.local_rank != failure.local_rank;
  };
  if (processes_.count_ranks(is_other) == 0) return "";
  const bool all_stay = processes_.count_ranks([&](const RankProcess& one) {
    return is_other(one) && !one.stays;
  }) == 0;
  return all_stay && table_.num_restarts < table_.max_restarts ? "" : "; ending the others";
}

// Whether it is known that there will be a next generation.
bool Agent::goes_on() const {
  return peers_->decision() && peers_->decision()->action != Decision::Action::end;
}

// Ranks that stay end only with the job, and until it is decided whether that ends, they do not.
bool Agent::has_to_end(const RankProcess& process) const {
  return !process.stays || interrupted_ || (peers_->decision() && !goes_on());
}

bool Agent::has_to_leave(const RankProcess& process) const {
  return !has_to_end(process) && !process.left;
}

int Agent::num_to_end() const {
  return processes_.count_ranks([this](const RankProcess& one) { return has_to_end(one); });
}

int Agent::num_to_leave() const {
  return processes_.count_ranks([this](const RankProcess& one) { return has_to_leave(one); });
}

void Agent::signal_ranks_to_end(int signal) {
  for (int slot = 0; slot < processes_.num_slots(); ++slot) {
    RankProcess& process = processes_[slot];
    if (!process.is_rank() || !has_to_end(process)) continue;
    read_line(process);  // messages that it has sent by now count; later ones need not
    process.to_end = true;
    guardian_.signal(slot, signal);
  }
}

// Gives ranks time to save their state.
void Agent::end_politely() {
  signal_ranks_to_end(SIGTERM);
  enter(Stage::terminated, options_.interrupt_grace);
}

// Stops this host's ranks because another launcher has seen a failure, or has decided to stop them.
void Agent::stop_as_decided() {
  const bool end = num_to_end() > 0;
  if (peers_->failure()) {
    say(peers_->failure()->sentence() + (end ? "; ending this host's ranks" : ""));
    enter(Stage::noticing, kNoticing);
  } else {
    say(peers_->decision()->reason +
        (end ? "; ending the ranks to go on with all" : "; going on with all"));
    end_politely();
  }
}

// Asks ranks that stay to leave the generation: at once after a failure, at the end of a step where
// nodes join.
void Agent::ask_to_leave() {
  const bool at_once =
      peers_->decision()->action == Decision::Action::restart || stage_ == Stage::leaving;
  if (told_to_leave_ || (asked_to_leave_ && !at_once)) return;
  asked_to_leave_ = true;
  told_to_leave_ = at_once;
  for (int slot = 0; slot < processes_.num_slots(); ++slot)
    if (processes_[slot].is_rank() && has_to_leave(processes_[slot]))
      processes_[slot].say(
          {.word = at_once ? LineMessage::Word::leave : LineMessage::Word::leave_soon});
}

void Agent::end_ranks_that_did_not_leave() {
  for (int slot = 0; slot < processes_.num_slots(); ++slot) {
    RankProcess& process = processes_[slot];
    if (!process.is_rank() || !has_to_leave(process)) continue;
    say(fmt::format("{} did not leave the generation within {:.1f} s: it is started anew",
                    name_of(process),
                    std::chrono::duration<double>(options_.leave_within).count()));
    process.stays = false;
  }
  signal_ranks_to_end(SIGKILL);
}

// Ends what ranks left behind.
void Agent::clear_up() {
  bool some_stay = false;
  for (int slot = 0; slot < processes_.num_slots(); ++slot)
    some_stay |= processes_[slot].runs && processes_[slot].stays;
  if (goes_on() && some_stay)
    guardian_.sweep();
  else
    guardian_.clear();
  enter(Stage::killed, kKilling);
}

void Agent::advance() {
  if (stage_ == Stage::running && (peers_->failure() || peers_->decision())) stop_as_decided();
  find_first_failure();
  if (stage_ != Stage::running && stage_ < Stage::killed && goes_on()) ask_to_leave();
  say_further_failures();
  const int to_end = num_to_end();
  const int to_leave = num_to_leave();
  if (guardian_.gone()) {
    if (stage_ != Stage::ended) enter(Stage::ended, kStuckReader);
  } else if (to_end == 0 && to_leave == 0 && stage_ < Stage::killed && suspects_.empty()) {
    clear_up();
  } else if (stage_ == Stage::noticing && goes_on() && to_end == 0) {
    enter(Stage::leaving, options_.leave_within);
  } else if (stage_ == Stage::leaving && to_end > 0 && to_leave == 0 && !goes_on()) {
    end_politely();  // the job ends, after all
  } else if (stage_deadline_.passed()) {
    advance_stage();
  }
  const bool waits =
      stage_ == Stage::interrupted || stage_ == Stage::terminated || stage_ == Stage::leaving;
  const auto silent =
      interrupted_ && !options_.interruption_note.empty() ? kSilentSave : kSilentWait;
  if (waits && !told_waiting_ && Clock::now() - stage_since_ > silent) say_whom_it_waits_for();
  if (stage_ == Stage::ended && !peers_->failure() && !peers_->decision() && !told_done_) {
    told_done_ = true;
    peers_->announce_done();
  }
}

// Called when the stage's time is over.
void Agent::advance_stage() {
  switch (stage_) {
    case Stage::interrupted: end_politely(); break;
    case Stage::noticing: {
      if (num_to_end() == 0) {
        enter(Stage::noticing, kNoticing);  // the leader has not decided yet
        break;
      }
      const auto& failure = peers_->failure();
      const bool polite = failure && failure->kind == Failure::Kind::interrupted;
      signal_ranks_to_end(SIGTERM);
      enter(Stage::terminated, polite ? options_.interrupt_grace : options_.grace);
      break;
    }
    case Stage::terminated:
      if (processes_.count_ranks([](const RankProcess& one) { return one.stays; }) > 0 &&
          !interrupted_ && (!peers_->decision() || goes_on())) {
        signal_ranks_to_end(SIGKILL);
        enter(Stage::leaving, options_.leave_within);
      } else {
        guardian_.clear();
        enter(Stage::killed, kKilling);
      }
      break;
    case Stage::leaving:
      if (num_to_leave() > 0) {
        end_ranks_that_did_not_leave();
        enter(Stage::leaving, kKilling);
      } else {
        guardian_.clear();
        enter(Stage::killed, kKilling);
      }
      break;
    case Stage::killed:
      say("some processes do not end: the kernel holds them");
      enter(Stage::ended, kStuckReader);
      break;
    case Stage::running:
    case Stage::ended: break;
  }
}

bool Agent::streams_open() const {
  for (int slot = 0; slot < processes_.num_slots(); ++slot)
    if (!processes_[slot].runs && processes_[slot].streams_open()) return true;
  return false;
}

bool Agent::finished() const {
  if (stage_ != Stage::ended) return false;
  if (!peers_->decision() && !peers_->all_done() && !guardian_.gone()) return false;
  if (!streams_open() && sinks_[0]->backlog() == 0 && sinks_[1]->backlog() == 0) return true;
  // Only a reader is left that has not taken everything yet. Where the job ended well, it may take
  // its time; the user can still interrupt.
  if (impatient_) return true;
  const bool stuck = Clock::now() - last_progress_ > kStuckReader;
  return peers_->decision() && stuck && stage_deadline_.passed();
}

}  // namespace lockstep::launch
