#include <lockstep/elastic/failure.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <utility>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>

namespace lockstep::elastic {

using OrderedJson = nlohmann::ordered_json;

namespace {

constexpr std::pair<Failure::Kind, const char*> kKinds[] = {
    {Failure::Kind::exit, "exit"},
    {Failure::Kind::signal, "signal"},
    {Failure::Kind::spawn, "spawn"},
    {Failure::Kind::node_lost, "node_lost"},
    {Failure::Kind::interrupted, "interrupted"},
    {Failure::Kind::too_few, "too_few_nodes"},
    {Failure::Kind::stopped, "stopped"},
    {Failure::Kind::stuck, "stuck"},
};

const char* kind_name(Failure::Kind kind) {
  for (const auto& [known, name] : kKinds)
    if (known == kind) return name;
  return "unknown";
}

// Output may hold any bytes; JSON may not.
std::string dump(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

// What users most often want to know next.
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

}  // namespace

std::string signal_name(int signal) {
  if (signal >= SIGRTMIN && signal <= SIGRTMAX)
    return fmt::format("SIGRTMIN+{}", signal - SIGRTMIN);
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

bool explained(const Failure& failure, const std::vector<int>& exit_codes) {
  if (failure.kind == Failure::Kind::interrupted) return !exit_codes.empty();
  return failure.kind == Failure::Kind::exit &&
         std::find(exit_codes.begin(), exit_codes.end(), failure.exit_code) != exit_codes.end();
}

bool worth_a_restart(const Failure& failure) {
  switch (failure.kind) {
    case Failure::Kind::exit:
    case Failure::Kind::signal:
    case Failure::Kind::node_lost:
    case Failure::Kind::stopped:
    case Failure::Kind::stuck: return !failure.final;
    case Failure::Kind::spawn:
    case Failure::Kind::interrupted:
    case Failure::Kind::too_few: break;
  }
  return false;
}

std::size_t first_of(const std::vector<Failure>& failures) {
  const auto blames_somebody = [](const Failure& one) { return !one.blame.ranks.empty(); };
  const auto blames = [](const Failure& one, const Failure& other) {
    return std::find(one.blame.ranks.begin(), one.blame.ranks.end(), other.rank) !=
           one.blame.ranks.end();
  };
  std::size_t first = failures.size();
  for (std::size_t i = 0; i < failures.size(); ++i) {
    if (blames_somebody(failures[i])) continue;
    if (first == failures.size()) first = i;
    if (std::any_of(failures.begin(), failures.end(),
                    [&](const Failure& one) { return blames(one, failures[i]); }))
      return i;
  }
  if (first < failures.size()) return first;
  std::vector<bool> passed(failures.size(), false);
  for (std::size_t at = 0; at < failures.size();) {
    first = at;
    passed[at] = true;
    for (at = 0; at < failures.size(); ++at)
      if (!passed[at] && blames(failures[first], failures[at])) break;
  }
  return first;
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
  OrderedJson json;
  json["kind"] = kind_name(kind);
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
  json["generation"] = generation;
  json["restarted"] = aftermath == Aftermath::restarted;
  return "lockstep: fault " + dump(json);
}

std::string Failure::encode() const {
  return dump({{"kind", kind_name(kind)},
               {"rank", rank},
               {"local_rank", local_rank},
               {"node_rank", node_rank},
               {"host", host},
               {"pid", pid},
               {"exit_code", exit_code},
               {"signal", signal},
               {"generation", generation},
               {"final", final},
               {"blamed_ranks", blame.ranks},
               {"blamed_for", blame.fault},
               {"step", step},
               {"detail", detail},
               {"last_lines", last_lines}});
}

Failure Failure::decode(const std::string& text) {
  try {
    const OrderedJson json = OrderedJson::parse(text);
    Failure failure;
    const std::string kind = json.at("kind");
    for (const auto& [known, name] : kKinds)
      if (kind == name) failure.kind = known;
    failure.rank = json.at("rank");
    failure.local_rank = json.at("local_rank");
    failure.node_rank = json.at("node_rank");
    failure.host = json.at("host");
    failure.pid = json.at("pid");
    failure.exit_code = json.at("exit_code");
    failure.signal = json.at("signal");
    failure.generation = json.at("generation");
    failure.final = json.at("final");
    failure.blame = {json.at("blamed_ranks"), json.at("blamed_for")};
    failure.step = json.at("step");
    failure.detail = json.at("detail");
    failure.last_lines = json.at("last_lines");
    return failure;
  } catch (const OrderedJson::exception& error) {
    throw UsageError("another launcher reported a failure in a form this one does not know ({}): "
                     "use the same version of lockstep on every host",
                     error.what());
  }
}

}  // namespace lockstep::elastic
