#include <lockstep/launch/rendezvous/messages.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <utility>

#include <nlohmann/json.hpp>

namespace lockstep {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Blame, ranks, fault)

namespace launch {

using Json = nlohmann::json;
using Kind = Failure::Kind;

NLOHMANN_JSON_SERIALIZE_ENUM(Failure::Kind, {{Kind::exit, "exit"},
                                             {Kind::signal, "signal"},
                                             {Kind::spawn, "spawn"},
                                             {Kind::node_lost, "node_lost"},
                                             {Kind::interrupted, "interrupted"},
                                             {Kind::too_few, "too_few_nodes"},
                                             {Kind::stopped, "stopped"},
                                             {Kind::stuck, "stuck"}})

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Introduction, node_rank, min_nodes, max_nodes, num_ranks, host,
                                   run_id, address, last_generation, last_node_rank, last_restarts,
                                   ready)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Node, host, num_ranks, address)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankTable, nodes, node_rank, master_addr, master_port, store,
                                   generation, num_restarts, max_restarts)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Failure, kind, rank, local_rank, node_rank, host, pid, exit_code,
                                   signal, generation, final, blame, step, detail, last_lines,
                                   output_files)

namespace {

constexpr std::int64_t kMostRanks = 1 << 24;

// The output of ranks may hold any bytes; JSON may not.
template <typename AnyJson>
std::string one_line(const AnyJson& json) {
  return json.dump(-1, ' ', false, AnyJson::error_handler_t::replace);
}

// The most likely reason why a process was ended by this signal.
const char* hint(int signal) {
  switch (signal) {
    case SIGKILL: return "; if nobody ended it, the system ran out of memory ('dmesg' tells)";
    case SIGBUS:
      return "; a file that it reads was cut short meanwhile (data, for instance), or shared "
             "memory "
             "is full ('df /dev/shm' tells)";
    case SIGILL: return "; it was built for another processor";
    default: return "";
  }
}

bool blames(const Failure& failure, int rank) {
  const auto& ranks = failure.blame.ranks;
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

}  // namespace

void fail_rendezvous(Fault fault, const std::string& explanation) {
  throw CommError(
      {.fault = fault, .operation = "rendezvous of the launchers", .explanation = explanation});
}

std::string Introduction::encode() const { return one_line(Json(*this)); }

Introduction Introduction::decode(const std::string& text) {
  try {
    return Json::parse(text).get<Introduction>();
  } catch (const Json::exception& error) {
    throw UsageError("a launcher introduced itself in a form this one does not know ({}): use the "
                     "same version of lockstep on every host",
                     error.what());
  }
}

std::string node_range(int min_nodes, int max_nodes) {
  const std::string most = std::to_string(max_nodes);
  return min_nodes == max_nodes ? most : std::to_string(min_nodes) + ":" + most;
}

std::string RankTable::encode() const { return one_line(Json(*this)); }

RankTable RankTable::decode(const std::string& text) {
  const auto corrupted = [](const std::string& what) {
    fail_rendezvous(
        Fault::corrupted,
        fmt::format("Node 0 sent a rank table in a form this launcher does not know ({}): "
                    "use the same version of lockstep on every host.",
                    what));
  };
  RankTable table;
  try {
    table = Json::parse(text).get<RankTable>();
  } catch (const Json::exception& error) {
    corrupted(error.what());
  }
  std::int64_t world_size = 0;
  for (const Node& node : table.nodes) {
    world_size += node.num_ranks;
    if (node.num_ranks < 1 || world_size > kMostRanks)
      corrupted("a node's number of ranks makes no sense");
  }
  if (table.node_rank < 0 || table.node_rank >= table.num_nodes()) corrupted("no such node in it");
  return table;
}

std::string Failure::because() const {
  if (blame.ranks.empty()) return "";
  return fmt::format(", because of {} ({}){}", list_ranks(blame.ranks), blame.fault,
                     detail.empty() ? "" : ": " + detail);
}

std::string Failure::sentence() const {
  const std::string who = fmt::format("rank {} (local rank {} on host {}", rank, local_rank, host);
  switch (kind) {
    case Kind::exit:
      return fmt::format("{}, pid {}) ended with exit code {}{}", who, pid, exit_code, because());
    case Kind::signal:
      return fmt::format("{}, pid {}) was ended by {}{}{}", who, pid, signal_name(signal),
                         hint(signal), because());
    case Kind::spawn: return fmt::format("{}) could not be started: {}", who, detail);
    case Kind::node_lost:
      return fmt::format("the launcher of node {} (host {}) is gone: {}", node_rank, host, detail);
    case Kind::interrupted:
      return fmt::format("the launcher of node {} (host {}) was told to end by {}", node_rank, host,
                         signal_name(signal));
    case Kind::stopped:
      return fmt::format("{}, pid {}) is stopped, by SIGSTOP or a terminal", who, pid);
    case Kind::stuck: return fmt::format("{}, pid {}) is stuck: {}", who, pid, detail);
    case Kind::too_few: break;
  }
  return detail;
}

std::string Failure::machine_line(Aftermath aftermath) const {
  nlohmann::ordered_json json;
  json["kind"] = Json(kind).get<std::string>();
  if (rank >= 0) {
    json["rank"] = rank;
    json["local_rank"] = local_rank;
  }
  json["node_rank"] = node_rank;
  json["host"] = host;
  if (signal != 0) json["signal"] = signal_name(signal);
  if (step >= 0) json["step"] = step;
  json["exit_code"] = exit_code;
  if (!blame.ranks.empty()) json["because_of"] = blame.ranks;
  if (!output_files.empty()) json["output_files"] = output_files;
  json["generation"] = generation;
  json["restarted"] = aftermath == Aftermath::restarted;
  return "lockstep: fault " + one_line(json);
}

std::string Failure::encode() const { return one_line(Json(*this)); }

Failure Failure::decode(const std::string& text) {
  try {
    return Json::parse(text).get<Failure>();
  } catch (const Json::exception& error) {
    throw UsageError("another launcher reported a failure in a form this one does not know ({}): "
                     "use the same version of lockstep on every host",
                     error.what());
  }
}

std::size_t first_of(const std::vector<Failure>& failures) {
  const std::size_t none = failures.size();
  std::size_t first = none;
  for (std::size_t i = 0; i < failures.size(); ++i) {
    if (!failures[i].blame.ranks.empty()) continue;
    if (first == none) first = i;
    if (std::any_of(failures.begin(), failures.end(),
                    [&](const Failure& one) { return blames(one, failures[i].rank); }))
      return i;
  }
  if (first != none) return first;
  std::vector<bool> passed(failures.size(), false);
  for (std::size_t at = 0; at < failures.size();) {
    first = at;
    passed[at] = true;
    for (at = 0; at < failures.size(); ++at)
      if (!passed[at] && blames(failures[first], failures[at].rank)) break;
  }
  return first;
}

bool explained(const Failure& failure, const std::vector<int>& exit_codes) {
  if (failure.kind == Kind::interrupted) return !exit_codes.empty();
  return failure.kind == Kind::exit &&
         std::find(exit_codes.begin(), exit_codes.end(), failure.exit_code) != exit_codes.end();
}

bool worth_a_restart(const Failure& failure) {
  switch (failure.kind) {
    case Kind::exit:
    case Kind::signal:
    case Kind::node_lost:
    case Kind::stopped:
    case Kind::stuck: return !failure.final;
    case Kind::spawn:
    case Kind::interrupted:
    case Kind::too_few: break;
  }
  return false;
}

std::string signal_name(int signal) {
  if (signal >= SIGRTMIN && signal <= SIGRTMAX)
    return fmt::format("SIGRTMIN+{}", signal - SIGRTMIN);
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

namespace {

constexpr std::pair<Decision::Action, const char*> kActions[] = {
    {Decision::Action::end, "end"},
    {Decision::Action::restart, "restart"},
    {Decision::Action::grow, "grow"},
};

}  // namespace

std::string Decision::encode() const {
  for (const auto& [known, name] : kActions)
    if (known == action) return fmt::format("{} {}", name, failure ? failure->encode() : reason);
  LOCKSTEP_CHECK(false, "no such action");
}

Decision Decision::decode(const std::string& text) {
  const auto space = text.find(' ');
  const std::string word = text.substr(0, space);
  const std::string rest = space == std::string::npos ? "" : text.substr(space + 1);
  for (const auto& [known, name] : kActions) {
    if (word != name) continue;
    if (known == Action::grow) return {known, std::nullopt, rest};
    return {known, Failure::decode(rest), ""};
  }
  throw UsageError(
      "node 0 decided '{}', which this launcher does not know: use the same version of "
      "lockstep on every host",
      word);
}

}  // namespace launch
}  // namespace lockstep
