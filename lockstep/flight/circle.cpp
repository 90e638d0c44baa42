#include <lockstep/flight/circle.h>

#include <algorithm>
#include <concepts>
#include <set>
#include <stdexcept>
#include <utility>

#include <spdlog/fmt/fmt.h>
#include <nlohmann/json.hpp>

namespace lockstep::flight {

namespace {

using nlohmann::json;

// Longer ways than any program has groups; they bound the work of a search, not its answer.
constexpr std::size_t kLongestWay = 64;
constexpr std::size_t kMostVisited = 4096;

std::string dump_text(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

// The library's own conversions make something of fractions and of numbers that do not fit.
template <std::integral Number>
Number whole_number(const json& value) {
  const bool fits =
      value.is_number_unsigned()
          ? std::in_range<Number>(value.get<std::uint64_t>())
          : value.is_number_integer() && std::in_range<Number>(value.get<std::int64_t>());
  if (!fits) throw std::out_of_range("not a whole number of this type");
  return value.get<Number>();
}

// Parses a text and gives it to `read`. Nothing where it is not JSON, or `read` misses something in
// it.
template <typename Read>
auto decoded(std::string_view text, const Read& read)
    -> std::optional<decltype(read(std::declval<const json&>()))> {
  try {
    return read(json::parse(text));
  } catch (const json::exception&) {
    return std::nullopt;
  } catch (const std::out_of_range&) {
    return std::nullopt;
  }
}

Question question_of(const BlockedCall& call, const BlockedCall::Need& need) {
  return {.group = call.group,
          .sequence = call.sequence,
          .asker = call.rank_in_group,
          .message = need.message,
          .refusals = call.refusals};
}

class CircleSearch {
 public:
  explicit CircleSearch(const Ask& ask) : ask_(ask) {}

  std::optional<Circle> run(const BlockedCall& from) {
    for (const BlockedCall::Need& need : from.needs) {
      const Answer answer = ask_(need.rank, question_of(from, need));
      if (answer.state == Answer::State::came_and_in && comes_first(need.rank, from))
        return std::nullopt;
      first_answers_.push_back(answer);
    }
    if (!visit(from)) return std::nullopt;
    return std::move(circle_);
  }

 private:
  // Needs are in the group's order, with this rank left out.
  static bool comes_first(int other, const BlockedCall& from) {
    const auto found = std::find_if(from.needs.begin(), from.needs.end(),
                                    [&](const auto& need) { return need.rank == other; });
    return found - from.needs.begin() < from.rank_in_group;
  }

  // True once a circle is found.
  bool visit(const BlockedCall& call) {
    for (std::size_t i = 0; i < way_.size(); ++i)
      if (way_[i].same_wait(call)) {
        circle_.calls.assign(way_.begin() + static_cast<std::ptrdiff_t>(i), way_.end());
        std::rotate(circle_.calls.begin(),
                    std::min_element(circle_.calls.begin(), circle_.calls.end(),
                                     [](const auto& a, const auto& b) { return a.rank < b.rank; }),
                    circle_.calls.end());
        return true;
      }
    if (!visited_.emplace(call.rank, call.thread).second) return false;
    if (way_.size() == kLongestWay || visited_.size() > kMostVisited) return false;
    way_.push_back(call);
    for (std::size_t i = 0; i < call.needs.size(); ++i) {
      const BlockedCall::Need& need = call.needs[i];
      const Answer answer =
          way_.size() == 1 ? first_answers_[i] : ask_(need.rank, question_of(call, need));
      if (answer.state == Answer::State::blocked && answer.call.rank == need.rank &&
          visit(answer.call))
        return true;
    }
    way_.pop_back();
    return false;
  }

  const Ask& ask_;
  std::vector<Answer> first_answers_;
  std::vector<BlockedCall> way_;
  std::set<std::pair<int, std::uint64_t>> visited_;
  Circle circle_;
};

}  // namespace

std::string Question::encode() const {
  return dump_text({group, sequence, asker, message, refusals});
}

std::optional<Question> Question::decode(std::string_view text) {
  return decoded(text, [](const json& value) {
    return Question{.group = value.at(0).get<std::string>(),
                    .sequence = whole_number<std::uint64_t>(value.at(1)),
                    .asker = whole_number<int>(value.at(2)),
                    .message = whole_number<std::uint64_t>(value.at(3)),
                    .refusals = whole_number<std::uint64_t>(value.at(4))};
  });
}

std::string Answer::encode() const {
  if (state == State::refused) return dump_text({static_cast<int>(state), refusal});
  if (state != State::blocked) return dump_text({static_cast<int>(state)});
  json needs = json::array();
  for (const BlockedCall::Need& need : call.needs) {
    needs.push_back(need.rank);
    needs.push_back(need.message);
  }
  return dump_text({static_cast<int>(state), call.rank, call.thread, call.group, call.rank_in_group,
                    call.entry, call.sequence, call.refusals, call.text, needs});
}

Answer Answer::decode(std::string_view text) {
  const auto answer = decoded(text, [](const json& value) {
    const int state = whole_number<int>(value.at(0));
    if (state < 0 || state > static_cast<int>(State::refused)) return Answer{};
    Answer read{.state = static_cast<State>(state), .call = {}};
    if (read.state == State::refused) read.refusal = value.at(1).get<std::string>();
    if (read.state != State::blocked) return read;
    read.call = {.rank = whole_number<int>(value.at(1)),
                 .thread = whole_number<std::uint64_t>(value.at(2)),
                 .group = value.at(3).get<std::string>(),
                 .rank_in_group = whole_number<int>(value.at(4)),
                 .entry = whole_number<std::uint64_t>(value.at(5)),
                 .sequence = whole_number<std::uint64_t>(value.at(6)),
                 .refusals = whole_number<std::uint64_t>(value.at(7)),
                 .text = value.at(8).get<std::string>(),
                 .needs = {}};
    const json& needs = value.at(9);
    for (std::size_t i = 0; i + 1 < needs.size(); i += 2)
      read.call.needs.push_back(
          {whole_number<int>(needs.at(i)), whole_number<std::uint64_t>(needs.at(i + 1))});
    return read;
  });
  return answer.value_or(Answer{});
}

std::string CircleNews::encode() const { return dump_text({group, ranks, text}); }

std::optional<CircleNews> CircleNews::decode(std::string_view text) {
  return decoded(text, [](const json& value) {
    CircleNews news{.group = value.at(0).get<std::string>(),
                    .ranks = {},
                    .text = value.at(2).get<std::string>()};
    for (const json& rank : value.at(1)) news.ranks.push_back(whole_number<int>(rank));
    return news;
  });
}

std::string CallToEnd::encode() const { return dump_text({group, thread, entry}); }

std::optional<CallToEnd> CallToEnd::decode(std::string_view text) {
  return decoded(text, [](const json& value) {
    return CallToEnd{.group = value.at(0).get<std::string>(),
                     .thread = whole_number<std::uint64_t>(value.at(1)),
                     .entry = whole_number<std::uint64_t>(value.at(2))};
  });
}

void OpenCalls::add(const std::string& group, std::shared_ptr<const Recorder> recorder) {
  const std::lock_guard lock(mutex_);
  groups_[group] = std::move(recorder);
}

void OpenCalls::remove(const std::string& group) {
  const std::lock_guard lock(mutex_);
  groups_.erase(group);
}

OpenCalls::Groups OpenCalls::groups() const {
  const std::lock_guard lock(mutex_);
  return groups_;
}

// Nothing of a call that is over, that the ring has lost, or that needs nobody to come.
std::optional<BlockedCall> OpenCalls::describe(const std::string& group, const Recorder& recorder,
                                               const BlockedThread& blocked) const {
  const auto entry = recorder.entry(blocked.entry);
  if (!entry || entry->state == State::finished || entry->state == State::failed)
    return std::nullopt;
  BlockedCall call{.rank = rank_,
                   .thread = blocked.thread,
                   .group = group,
                   .rank_in_group = recorder.rank(),
                   .entry = blocked.entry,
                   .sequence = entry->sequence,
                   .refusals = recorder.num_refusals()};
  const std::vector<int>& members = recorder.global_ranks();
  if (entry->sequence == 0) {
    for (std::size_t i = 0; i < entry->peers.size(); ++i)
      if (const auto peer = static_cast<std::size_t>(entry->peers[i]);
          entry->receives[i] != 0 && peer < members.size())
        call.needs.push_back({members[peer], entry->receives[i]});
  } else if (entry->needs == Record::kEveryone) {
    for (const int member : members)
      if (member != recorder.global_rank()) call.needs.push_back({member, 0});
  } else if (entry->needs >= 0 && static_cast<std::size_t>(entry->needs) < members.size()) {
    call.needs.push_back({members[static_cast<std::size_t>(entry->needs)], 0});
  }
  if (call.needs.empty()) return std::nullopt;
  call.text = fmt::format("{} of group '{}'{}", entry->summary, recorder.group(),
                          entry->call_site.empty() ? "" : " (" + entry->call_site + ")");
  return call;
}

std::vector<OpenCalls::Wait> OpenCalls::waits() const {
  std::vector<Wait> result;
  for (const auto& [group, recorder] : groups())
    for (const BlockedThread& blocked : recorder->blocked())
      if (auto call = describe(group, *recorder, blocked))
        result.push_back({std::move(*call), blocked.since_ns});
  return result;
}

Answer OpenCalls::answer(const Question& question) const {
  const Groups all = groups();
  const auto asked = all.find(question.group);
  if (asked == all.end()) return {};
  const Recorder& recorder = *asked->second;
  const bool came = question.sequence != 0 ? recorder.last_sequence() >= question.sequence
                                           : recorder.sent_to(question.asker) >= question.message;
  std::map<std::uint64_t, std::pair<const Groups::value_type*, BlockedThread>> blocked;
  for (const auto& group : all)
    for (const BlockedThread& one : group.second->blocked()) blocked[one.thread] = {&group, one};
  if (came) {
    for (const auto& [thread, where] : blocked) {
      if (where.first->first != question.group || question.sequence == 0) continue;
      const auto entry = recorder.entry(where.second.entry);
      if (entry && entry->sequence == question.sequence)
        return {.state = Answer::State::came_and_in, .call = {}};
    }
    return {.state = Answer::State::came, .call = {}};
  }
  if (recorder.num_refusals() > question.refusals)
    if (std::string refusal = recorder.refusal(); !refusal.empty())
      return {.state = Answer::State::refused, .call = {}, .refusal = std::move(refusal)};
  // Read once: another thread may make a call meanwhile.
  const auto awaited = blocked.find(recorder.caller());
  if (awaited == blocked.end()) return {};
  for (const auto& [group, one] : all)
    if (!blocked.contains(one->caller())) return {};
  const auto& [where, thread] = awaited->second;
  auto call = describe(where->first, *where->second, thread);
  if (!call) return {};
  return {.state = Answer::State::blocked, .call = std::move(*call)};
}

std::string Circle::text() const {
  std::string text = "Ranks wait for each other in different calls, which none of them can leave: ";
  for (std::size_t i = 0; i < calls.size(); ++i)
    text += fmt::format("{}rank {} waits in {} for rank {}", i == 0 ? "" : "; ", calls[i].rank,
                        calls[i].text, calls[(i + 1) % calls.size()].rank);
  return text + ".";
}

std::string Refusal::text() const {
  return fmt::format("Rank {} does not come to this call. It has thrown this error instead: {}",
                     rank, reason);
}

std::optional<Refusal> find_refusal(const BlockedCall& from, const Ask& ask) {
  for (const BlockedCall::Need& need : from.needs) {
    Answer answer = ask(need.rank, question_of(from, need));
    if (answer.state == Answer::State::refused)
      return Refusal{.rank = need.rank, .reason = std::move(answer.refusal)};
  }
  return std::nullopt;
}

std::optional<Circle> find_circle(const BlockedCall& from, const Ask& ask) {
  return CircleSearch(ask).run(from);
}

bool still_waits(const Circle& circle, std::size_t call, const Ask& ask) {
  const BlockedCall& awaited = circle.calls[call];
  const BlockedCall& before = circle.calls[call == 0 ? circle.calls.size() - 1 : call - 1];
  const auto need = std::find_if(before.needs.begin(), before.needs.end(),
                                 [&](const auto& each) { return each.rank == awaited.rank; });
  if (need == before.needs.end()) return false;
  const Answer answer = ask(awaited.rank, question_of(before, *need));
  return answer.state == Answer::State::blocked && answer.call.same_wait(awaited);
}

bool still_there(const Circle& circle, const Ask& ask) {
  for (std::size_t call = 0; call < circle.calls.size(); ++call)
    if (!still_waits(circle, call, ask)) return false;
  return !circle.calls.empty();
}

}  // namespace lockstep::flight
