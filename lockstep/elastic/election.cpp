#include <lockstep/elastic/election.h>

#include <charconv>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>

namespace lockstep::elastic {

using Json = nlohmann::json;

namespace {

constexpr milliseconds kOneRequest(1500);
constexpr milliseconds kRenewal(1000);
constexpr milliseconds kBetweenLooks(200);
// Before etcd's own count ends, ours does.
constexpr milliseconds kMargin(500);
// For those who know the job to stand first.
constexpr milliseconds kPrecedence(1000);
// One request may be lost without a word.
constexpr int kFailuresToTell = 2;
constexpr std::size_t kLongestAddress = 300;

Deadline one_request() { return Deadline::after(kOneRequest); }

std::int64_t term_of(const Etcd::Value& value) {
  std::int64_t term = 0;
  std::from_chars(value.text.data(), value.text.data() + value.text.size(), term);
  return term > 0 && term < INT64_MAX ? term : 0;
}

std::optional<net::Address> address_in(const std::string& text) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("address") || !json["address"].is_string())
    return std::nullopt;
  const auto& address = json["address"].get_ref<const std::string&>();
  if (address.size() > kLongestAddress) return std::nullopt;
  try {
    const net::Address parsed = net::Address::parse(address, 0, "etcd");
    if (parsed.port > 0) return parsed;
  } catch (const UsageError&) {  // something else is there
  }
  return std::nullopt;
}

}  // namespace

Election::Election(std::vector<net::Address> members, const std::string& job,
                   const net::Address& own)
    : hub_key_("lockstep/" + job + "/hub"),
      term_key_("lockstep/" + job + "/term"),
      own_(own),
      etcd_(std::move(members)),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

Election::~Election() {
  thread_.request_stop();
  thread_.join();
  if (standing_.office == Office::ours && standing_.trouble.empty()) resign();
}

void Election::resign() {
  try {
    etcd_.transact({.conditions = {{hub_key_, Etcd::Transaction::Revision::create, created_}},
                    .erased = {hub_key_, term_key_}},
                   one_request());
    etcd_.revoke(lease_.id, one_request());
  } catch (const CommError& error) {
    log::debug("the place of node 0 in etcd is free only when its lease ends: {}", error.what());
  }
}

void Election::wish(Wish wish) {
  const std::lock_guard lock(mutex_);
  unwanted_ |= standing_.office == Office::ours;
  wish_ = wish;
  ++num_wishes_;
  standing_.office = Office::unknown;
  urgent_ = true;
  changed_.notify_all();
}

Election::Standing Election::standing() const {
  const std::lock_guard lock(mutex_);
  Standing now = standing_;
  if (now.office == Office::ours && Clock::now() >= ours_until_) now.office = Office::doubtful;
  return now;
}

void Election::confirm(int generation) {
  const std::lock_guard lock(mutex_);
  to_confirm_ = generation;
  confirmed_.reset();
  urgent_ = true;
  changed_.notify_all();
}

std::optional<int> Election::confirmed() const {
  const std::lock_guard lock(mutex_);
  return confirmed_;
}

void Election::run(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    try {
      step();
      const std::lock_guard lock(mutex_);
      if (num_failures_ >= kFailuresToTell) log::warn("etcd at {} answers again", etcd_.members());
      num_failures_ = 0;
      standing_.trouble.clear();
    } catch (const CommError& error) {
      note_trouble(error.details().explanation);
    }
    std::unique_lock lock(mutex_);
    const bool holds = standing_.office == Office::ours;
    const auto until = Clock::now() + (holds ? kRenewal : kBetweenLooks);
    const auto hurried = [&] { return urgent_; };
    if (!holds && wish_ == Wish::rest)
      changed_.wait(lock, stop, hurried);
    else
      changed_.wait_until(lock, stop, until, hurried);
    urgent_ = false;
  }
}

void Election::note_trouble(const std::string& what) {
  const std::lock_guard lock(mutex_);
  standing_.trouble = what;
  if (++num_failures_ == kFailuresToTell)
    log::warn(
        "etcd at {} gives no useful answer ({}): a job that runs goes on; until etcd is back, it "
        "cannot be formed anew, and nobody can take the place of node 0",
        etcd_.members(), what);
}

void Election::step() {
  bool holds = false, unwanted = false;
  Wish wish = Wish::rest;
  {
    const std::lock_guard lock(mutex_);
    holds = standing_.office == Office::ours;
    unwanted = unwanted_;
    wish = wish_;
  }
  if (unwanted) give_back();
  if (holds) {
    keep();
  } else if (wish != Wish::rest) {
    look();
  }
}

// Renews the lease, and asks whether the key is still the one that was made with it.
void Election::keep() {
  int generation = -1;
  bool confirmed = false;
  std::int64_t term = 0;
  {
    const std::lock_guard lock(mutex_);
    generation = to_confirm_;
    confirmed = confirmed_ == generation;
    term = standing_.term;
  }
  const auto asked = Clock::now();
  const milliseconds left = etcd_.keep_alive(lease_.id, one_request());
  Etcd::Transaction check{.conditions = {{hub_key_, Etcd::Transaction::Revision::create, created_}},
                          .reads = {hub_key_, term_key_}};
  const bool lasts = left > milliseconds(0);
  if (lasts && !confirmed) check.puts = {{hub_key_, own_text(), lease_.id}};
  const Etcd::Outcome outcome = etcd_.transact(check, one_request());
  if (outcome.held) {
    if (!lasts) return;  // the key is about to go with its lease
    const std::lock_guard lock(mutex_);
    ours_until_ = lease_until_ = asked + left - kMargin;
    if (generation == to_confirm_) confirmed_ = generation;
    ++standing_.look;
    return;
  }
  lease_ = {};
  // The lease ended, while etcd could not be reached. Where nobody else has held the office since,
  // nothing has happened.
  const bool nobody_since = !outcome.values[0].exists() && term_of(outcome.values[1]) == term;
  if (nobody_since && campaign(outcome.values[1])) return;
  const std::lock_guard lock(mutex_);
  standing_.office = Office::lost;
  wish_ = Wish::rest;
}

void Election::look() {
  see(etcd_.transact({.reads = {hub_key_, term_key_}}, one_request()).values);
}

void Election::see(const std::vector<Etcd::Value>& values) {
  const Etcd::Value& hub = values[0];
  if (hub.exists() && lease_.id != 0 && hub.lease == lease_.id) {  // the answer to us was lost
    hold(hub.create_revision, term_of(values[1]), lease_until_);
    return;
  }
  std::uint64_t num_wishes = 0;
  Wish wish = Wish::rest;
  {
    const std::lock_guard lock(mutex_);
    num_wishes = num_wishes_;
    wish = wish_;
  }
  if (hub.exists()) {
    const auto address = address_in(hub.text);
    if (!address)
      throw CommError(
          {.fault = Fault::corrupted,
           .operation = "election",
           .explanation = fmt::format("its key {} does not hold a launcher's address", hub_key_)});
    seen_somebody_ = true;
    vacant_since_.reset();
    const std::lock_guard lock(mutex_);
    if (num_wishes != num_wishes_) return;
    standing_ = {.office = Office::others,
                 .hub = *address,
                 .term = term_of(values[1]),
                 .look = standing_.look + 1};
    return;
  }
  if (!vacant_since_) vacant_since_ = Clock::now();
  const bool others_first =
      wish == Wish::stand_behind && seen_somebody_ && Clock::now() < *vacant_since_ + kPrecedence;
  if ((wish == Wish::stand || wish == Wish::stand_behind) && !others_first && campaign(values[1]))
    return;
  const std::lock_guard lock(mutex_);
  if (num_wishes != num_wishes_) return;
  standing_ = {.office = Office::vacant, .look = standing_.look + 1};
}

// Whether it was won.
bool Election::campaign(const Etcd::Value& term) {
  if (lease_.id == 0 || Clock::now() >= lease_until_) {
    const auto asked = Clock::now();
    lease_ = etcd_.grant(kLease, one_request());
    lease_until_ = asked + lease_.ttl - kMargin;
  }
  const std::int64_t next = term_of(term) + 1;
  try {
    const Etcd::Outcome outcome = etcd_.transact(
        {.conditions = {{hub_key_, Etcd::Transaction::Revision::create, 0},
                        {term_key_, Etcd::Transaction::Revision::mod, term.mod_revision}},
         .puts = {{hub_key_, own_text(), lease_.id}, {term_key_, std::to_string(next), 0}},
         .reads = {hub_key_}},
        one_request());
    if (!outcome.held) return false;
    hold(outcome.values[0].create_revision, next, lease_until_);
    return true;
  } catch (const CommError& error) {
    if (error.fault() == Fault::refused) lease_ = {};  // it may have ended meanwhile
    throw;
  }
}

void Election::hold(std::int64_t created, std::int64_t term, Clock::time_point until) {
  created_ = created;
  seen_somebody_ = false;
  vacant_since_.reset();
  const std::lock_guard lock(mutex_);
  urgent_ = true;  // to renew what it took time to win
  unwanted_ = wish_ == Wish::rest;
  if (unwanted_) return;
  standing_ = {.office = Office::ours, .hub = own_, .term = term, .look = standing_.look + 1};
  ours_until_ = until;
}

void Election::give_back() {
  etcd_.transact({.conditions = {{hub_key_, Etcd::Transaction::Revision::create, created_}},
                  .erased = {hub_key_}},
                 one_request());
  lease_ = {};
  const std::lock_guard lock(mutex_);
  unwanted_ = false;
}

std::string Election::own_text() const {
  const std::lock_guard lock(mutex_);
  return Json{{"address", own_.text()}, {"generation", to_confirm_}}.dump();
}

}  // namespace lockstep::elastic
