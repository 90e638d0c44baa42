#include <lockstep/comm/transport/wait_watch.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include <lockstep/base/log.h>
#include <lockstep/comm/operations/operation.h>

namespace lockstep::comm {

namespace {

// A wait that has lasted is asked about less often, because only a new wait can close a circle.
constexpr milliseconds kLongestInterval(10'000);
// How long a rank may take to answer, and how many silent ranks one look waits for.
constexpr milliseconds kAnswerTime(500);
constexpr int kMostSilent = 3;
constexpr char kQuestion = '?';
constexpr char kNews = '!';
constexpr char kEnd = '.';
constexpr std::size_t kLongestText = 2500;  // leaves room for the rest of a purpose, or of a notice

constexpr const char* kUsualCauses =
    " All ranks must make the same calls in the same order, over all groups. Usual causes: a rank "
    "without samples that skips forward or backward (let it run any batch as the others do, and "
    "dist.backward(model, 0 * loss_sum, 0)); an input or a parameter that requires a gradient on "
    "some ranks only; a sum, mean or barrier in a branch that not all ranks take.";

}  // namespace

WaitWatch::WaitWatch(std::shared_ptr<Endpoint> endpoint, int rank,
                     std::vector<EndpointAddress> addresses, Times times)
    : endpoint_(std::move(endpoint)),
      rank_(rank),
      addresses_(std::move(addresses)),
      times_(times),
      open_(rank) {
  endpoint_->set_answers([this](const std::string& question) { return answer(question); });
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    endpoint_->set_answers(nullptr);
    throw;
  }
}

WaitWatch::~WaitWatch() {
  endpoint_->set_answers(nullptr);
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::unique_ptr<WaitWatch::Watched> WaitWatch::watch(
    const std::string& id, std::shared_ptr<const flight::Recorder> recorder, End end) {
  auto group = std::make_shared<Group>();
  group->recorder = recorder;
  group->end = std::move(end);
  {
    const std::lock_guard lock(mutex_);
    groups_[id] = std::move(group);
  }
  open_.add(id, std::move(recorder));
  return std::make_unique<Watched>(*this, id);
}

void WaitWatch::forget(const std::string& id) {
  open_.remove(id);
  std::shared_ptr<Group> group;
  {
    const std::lock_guard lock(mutex_);
    const auto found = groups_.find(id);
    if (found == groups_.end()) return;
    group = std::move(found->second);
    groups_.erase(found);
  }
  const std::lock_guard lock(group->mutex);
  group->end = nullptr;
}

// Runs in the endpoint's thread.
std::string WaitWatch::answer(const std::string& question) {
  if (question.empty()) return "";
  const std::string_view rest = std::string_view(question).substr(1);
  if (question.front() == kQuestion) {
    const auto asked = flight::Question::decode(rest);
    return asked ? open_.answer(*asked).encode() : "";
  }
  if (question.front() == kNews) {
    if (const auto news = flight::CircleNews::decode(rest)) take(*news);
  } else if (question.front() == kEnd) {
    if (auto ending = flight::CallToEnd::decode(rest)) {
      const std::lock_guard lock(mutex_);
      endings_.push_back(std::move(*ending));
      changed_.notify_all();
    }
  }
  return "";
}

std::optional<CommError::Details> WaitWatch::verdict(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const auto found = groups_.find(id);
  return found == groups_.end() ? std::nullopt : found->second->verdict;
}

void WaitWatch::take(const flight::CircleNews& news) {
  const std::lock_guard lock(mutex_);
  const auto found = groups_.find(news.group);
  if (found == groups_.end() || found->second->verdict) return;
  CommError::Details verdict{.fault = Fault::mismatch, .explanation = news.text};
  const std::vector<int>& members = found->second->recorder->global_ranks();
  for (std::size_t member = 0; member < members.size(); ++member)
    if (std::find(news.ranks.begin(), news.ranks.end(), members[member]) != news.ranks.end())
      verdict.ranks.push_back(static_cast<int>(member));
  found->second->verdict = std::move(verdict);
}

void WaitWatch::run() {
  while (pause(times_.interval)) {
    try {
      end_calls();
      look();
    } catch (const std::exception& error) {
      log::debug("while calls that wait were looked at: {}", error.what());
    }
  }
}

bool WaitWatch::pause(milliseconds span) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, span, [this] { return stopping_ || !endings_.empty(); });
  return !stopping_;
}

void WaitWatch::end_calls() {
  std::vector<flight::CallToEnd> all;
  {
    const std::lock_guard lock(mutex_);
    all.swap(endings_);
  }
  for (const flight::CallToEnd& ending : all) end_call(ending);
}

void WaitWatch::look() {
  const auto waits = open_.waits();
  const auto now = Clock::now();
  const std::int64_t now_ns = flight::now_ns();
  std::map<WaitKey, Clock::time_point> next_look;
  for (const auto& [call, since_ns] : waits) {
    const auto age =
        std::chrono::duration_cast<milliseconds>(std::chrono::nanoseconds(now_ns - since_ns));
    if (age < times_.grace) continue;
    const WaitKey key(call.group, call.thread, call.entry);
    const auto planned = next_look_.find(key);
    if (planned != next_look_.end() && now < planned->second) {
      next_look.insert(*planned);
      continue;
    }
    int silent = 0;
    const flight::Ask ask = [&](int rank, const flight::Question& question) -> flight::Answer {
      if (rank == rank_) return open_.answer(question);
      if (rank < 0 || static_cast<std::size_t>(rank) >= addresses_.size() || silent == kMostSilent)
        return {};
      try {
        return flight::Answer::decode(endpoint_->inquire(addresses_[static_cast<std::size_t>(rank)],
                                                         kQuestion + question.encode(),
                                                         Deadline::after(kAnswerTime)));
      } catch (const Error&) {
        ++silent;
        return {};
      }
    };
    const auto refusal = flight::find_refusal(call, ask);
    if (refusal && pause(times_.second_look) && flight::find_refusal(call, ask) == refusal) {
      tell(refusal->text(), {refusal->rank}, {call});
      return;
    }
    const auto circle = flight::find_circle(call, ask);
    if (circle && pause(times_.second_look) && flight::still_there(*circle, ask)) {
      std::vector<int> ranks;
      for (const flight::BlockedCall& one : circle->calls) ranks.push_back(one.rank);
      const auto nothing = [](std::int32_t) { return std::string(); };
      tell(name_subjects(circle->text(), nothing) + kUsualCauses, ranks, circle->calls);
      return;
    }
    next_look[key] =
        Clock::now() + std::clamp<milliseconds>(age / 2, times_.grace, kLongestInterval);
  }
  next_look_ = std::move(next_look);
}

bool WaitWatch::send(int rank, const std::string& message) {
  if (rank < 0 || static_cast<std::size_t>(rank) >= addresses_.size()) return false;
  try {
    endpoint_->inquire(addresses_[static_cast<std::size_t>(rank)], message,
                       Deadline::after(kAnswerTime));
    return true;
  } catch (const Error& error) {
    log::debug("rank {} could not be told of a circle: {}", rank, error.what());
    return false;
  }
}

void WaitWatch::tell(std::string text, const std::vector<int>& at_fault,
                     const std::vector<flight::BlockedCall>& calls) {
  flight::CircleNews news{.group = {}, .ranks = at_fault, .text = std::move(text)};
  if (news.text.size() > kLongestText) news.text.resize(kLongestText);
  int silent = 0;
  for (const flight::BlockedCall& call : calls) {
    news.group = call.group;
    std::vector<int> ranks = {call.rank};
    for (const flight::BlockedCall::Need& need : call.needs) ranks.push_back(need.rank);
    for (const int rank : ranks) {
      if (rank == rank_)
        take(news);
      else if (silent < kMostSilent && !send(rank, kNews + news.encode()))
        ++silent;
    }
  }
  for (const flight::BlockedCall& call : calls) {
    const flight::CallToEnd ending{.group = call.group, .thread = call.thread, .entry = call.entry};
    if (call.rank == rank_)
      end_call(ending);
    else
      send(call.rank, kEnd + ending.encode());
  }
}

void WaitWatch::end_call(const flight::CallToEnd& ending) {
  std::shared_ptr<Group> group;
  {
    const std::lock_guard lock(mutex_);
    const auto found = groups_.find(ending.group);
    if (found == groups_.end() || !found->second->verdict) return;
    group = found->second;
  }
  const flight::Recorder& recorder = *group->recorder;
  const auto blocked = recorder.blocked();
  const bool there = std::any_of(blocked.begin(), blocked.end(), [&](const auto& each) {
    return each.thread == ending.thread && each.entry == ending.entry;
  });
  const auto entry = recorder.entry(ending.entry);
  if (!there || !entry) return;
  CommError::Details error = *group->verdict;
  error.operation = entry->operation;
  error.sequence = entry->sequence;
  const std::lock_guard lock(group->mutex);
  if (group->end) group->end(std::move(error));
}

}  // namespace lockstep::comm
