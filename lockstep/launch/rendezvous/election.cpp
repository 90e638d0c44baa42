#include <lockstep/launch/rendezvous/election.h>

#include <charconv>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>

namespace lockstep::launch {

using Json = nlohmann::json;

namespace {

constexpr milliseconds kOneRequest(1500);
constexpr milliseconds kRenewal(1000);
constexpr milliseconds kBetweenLooks(200);
// Our count of the lease ends so much earlier than etcd's.
constexpr milliseconds kMargin(500);
// A head start for survivors, who know the job.
constexpr milliseconds kSurvivorsFirst(1000);
// A single request that is lost is not worth a warning.
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
  } catch (const UsageError&) {  // the key holds something else
  }
  return std::nullopt;
}

}  // namespace

Election::Election(std::vector<net::Address> members, const std::string& job,
                   const net::Address& own)
    : leader_key_("lockstep/" + job + "/leader"),
      term_key_("lockstep/" + job + "/term"),
      own_(own),
      etcd_(std::move(members)),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

Election::~Election() {
  thread_.request_stop();
  thread_.join();
  if (status_.leadership == Leadership::ours && status_.trouble.empty()) resign();
}

void Election::resign() {
  try {
    etcd_.transact({.conditions = {{leader_key_, Etcd::Transaction::Revision::create, created_}},
                    .erased = {leader_key_, term_key_}},
                   one_request());
    etcd_.revoke(lease_.id, one_request());
  } catch (const CommError& error) {
    log::debug("the place of node 0 in etcd is free only when its lease ends: {}", error.what());
  }
}

void Election::wish(Wish wish) {
  const std::lock_guard lock(mutex_);
  unwanted_ |= status_.leadership == Leadership::ours;
  wish_ = wish;
  ++num_wishes_;
  status_.leadership = Leadership::unknown;
  urgent_ = true;
  changed_.notify_all();
}

Election::Status Election::status() const {
  const std::lock_guard lock(mutex_);
  Status now = status_;
  if (now.leadership == Leadership::ours && Clock::now() >= ours_until_)
    now.leadership = Leadership::doubtful;
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
      status_.trouble.clear();
    } catch (const CommError& error) {
      note_trouble(error.details().explanation);
    }
    std::unique_lock lock(mutex_);
    const bool leads = status_.leadership == Leadership::ours;
    const auto until = Clock::now() + (leads ? kRenewal : kBetweenLooks);
    const auto hurried = [&] { return urgent_; };
    if (!leads && wish_ == Wish::idle)
      changed_.wait(lock, stop, hurried);
    else
      changed_.wait_until(lock, stop, until, hurried);
    urgent_ = false;
  }
}

void Election::note_trouble(const std::string& what) {
  const std::lock_guard lock(mutex_);
  status_.trouble = what;
  if (++num_failures_ == kFailuresToTell)
    log::warn(
        "etcd at {} gives no useful answer ({}): a job that runs goes on; until etcd is back, it "
        "cannot be formed anew, and nobody can take the place of node 0",
        etcd_.members(), what);
}

void Election::step() {
  bool leads = false, unwanted = false;
  Wish wish = Wish::idle;
  {
    const std::lock_guard lock(mutex_);
    leads = status_.leadership == Leadership::ours;
    unwanted = unwanted_;
    wish = wish_;
  }
  if (unwanted) give_up();
  if (leads) {
    renew();
  } else if (wish != Wish::idle) {
    look();
  }
}

// Renews the lease, and asks whether the key is still the one that we made with it.
void Election::renew() {
  int generation = -1;
  bool confirmed = false;
  std::int64_t term = 0;
  {
    const std::lock_guard lock(mutex_);
    generation = to_confirm_;
    confirmed = confirmed_ == generation;
    term = status_.term;
  }
  const auto asked = Clock::now();
  const milliseconds left = etcd_.keep_alive(lease_.id, one_request());
  Etcd::Transaction check{
      .conditions = {{leader_key_, Etcd::Transaction::Revision::create, created_}},
      .reads = {leader_key_, term_key_}};
  const bool lasts = left > milliseconds(0);
  if (lasts && !confirmed) check.puts = {{leader_key_, own_text(), lease_.id}};
  const Etcd::Outcome outcome = etcd_.transact(check, one_request());
  if (outcome.held) {
    if (!lasts) return;  // the key is about to go with its lease
    const std::lock_guard lock(mutex_);
    ours_until_ = lease_until_ = asked + left - kMargin;
    if (generation == to_confirm_) confirmed_ = generation;
    ++status_.answers;
    return;
  }
  lease_ = {};
  // The lease ended while etcd could not be reached. Where nobody else has led since, this launcher
  // goes on leading.
  const bool nobody_since = !outcome.values[0].exists() && term_of(outcome.values[1]) == term;
  if (nobody_since && campaign(outcome.values[1])) return;
  const std::lock_guard lock(mutex_);
  status_.leadership = Leadership::lost;
  wish_ = Wish::idle;
}

void Election::look() {
  judge(etcd_.transact({.reads = {leader_key_, term_key_}}, one_request()).values);
}

void Election::judge(const std::vector<Etcd::Value>& values) {
  const Etcd::Value& leader = values[0];
  if (leader.exists() && lease_.id != 0 &&
      leader.lease == lease_.id) {  // we won, and the answer was lost
    lead(leader.create_revision, term_of(values[1]), lease_until_);
    return;
  }
  std::uint64_t num_wishes = 0;
  Wish wish = Wish::idle;
  {
    const std::lock_guard lock(mutex_);
    num_wishes = num_wishes_;
    wish = wish_;
  }
  if (leader.exists()) {
    const auto address = address_in(leader.text);
    if (!address)
      throw CommError({.fault = Fault::corrupted,
                       .operation = "election",
                       .explanation = fmt::format("its key {} does not hold a launcher's address",
                                                  leader_key_)});
    seen_leader_ = true;
    vacant_since_.reset();
    const std::lock_guard lock(mutex_);
    if (num_wishes != num_wishes_) return;
    status_ = {.leadership = Leadership::others,
               .leader = *address,
               .term = term_of(values[1]),
               .answers = status_.answers + 1};
    return;
  }
  if (!vacant_since_) vacant_since_ = Clock::now();
  const bool others_first = wish == Wish::campaign_after_survivors && seen_leader_ &&
                            Clock::now() < *vacant_since_ + kSurvivorsFirst;
  if ((wish == Wish::campaign || wish == Wish::campaign_after_survivors) && !others_first &&
      campaign(values[1]))
    return;
  const std::lock_guard lock(mutex_);
  if (num_wishes != num_wishes_) return;
  status_ = {.leadership = Leadership::vacant, .answers = status_.answers + 1};
}

// Returns whether this launcher has won.
bool Election::campaign(const Etcd::Value& term) {
  if (lease_.id == 0 || Clock::now() >= lease_until_) {
    const auto asked = Clock::now();
    lease_ = etcd_.grant(kLease, one_request());
    lease_until_ = asked + lease_.ttl - kMargin;
  }
  const std::int64_t next = term_of(term) + 1;
  try {
    const Etcd::Outcome outcome = etcd_.transact(
        {.conditions = {{leader_key_, Etcd::Transaction::Revision::create, 0},
                        {term_key_, Etcd::Transaction::Revision::mod, term.mod_revision}},
         .puts = {{leader_key_, own_text(), lease_.id}, {term_key_, std::to_string(next), 0}},
         .reads = {leader_key_}},
        one_request());
    if (!outcome.held) return false;
    lead(outcome.values[0].create_revision, next, lease_until_);
    return true;
  } catch (const CommError& error) {
    if (error.fault() == Fault::refused) lease_ = {};  // it may have ended meanwhile
    throw;
  }
}

void Election::lead(std::int64_t created, std::int64_t term, Clock::time_point until) {
  created_ = created;
  seen_leader_ = false;
  vacant_since_.reset();
  const std::lock_guard lock(mutex_);
  urgent_ = true;  // winning took some of the lease: renew it now
  unwanted_ = wish_ == Wish::idle;
  if (unwanted_) return;
  status_ = {
      .leadership = Leadership::ours, .leader = own_, .term = term, .answers = status_.answers + 1};
  ours_until_ = until;
}

void Election::give_up() {
  etcd_.transact({.conditions = {{leader_key_, Etcd::Transaction::Revision::create, created_}},
                  .erased = {leader_key_}},
                 one_request());
  lease_ = {};
  const std::lock_guard lock(mutex_);
  unwanted_ = false;
}

std::string Election::own_text() const {
  const std::lock_guard lock(mutex_);
  return Json{{"address", own_.text()}, {"generation", to_confirm_}}.dump();
}

}  // namespace lockstep::launch
