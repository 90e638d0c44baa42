#include <nlohmann/json.hpp>

#include <lockstep/flight/report.h>
#include <lockstep/flight/verdict.h>

namespace lockstep::flight {

namespace {

using nlohmann::json;

json call_json(const Entry& entry, const Dump& dump) {
  return {{"operation", entry.operation}, {"sequence", entry.sequence},
          {"summary", entry.summary},     {"call_site", entry.call_site},
          {"state", name(entry.state)},   {"seconds", seconds_of(entry, dump)}};
}

json wait_json(const Wait& wait) {
  return {{"rank", wait.rank},
          {"group", wait.group->name},
          {"call", call_json(*wait.call, *wait.dump)},
          {"for_ranks", wait.for_ranks}};
}

json finding_json(const Finding& finding) {
  json result = {{"kind", name(finding.kind)},
                 {"ranks", finding.ranks},
                 {"group", finding.group->name},
                 {"members", finding.group->members},
                 {"operation", finding.call->operation},
                 {"sequence", finding.call->sequence},
                 {"call_site", finding.call->call_site},
                 {"waiting", finding.waiting},
                 {"seconds", finding.seconds},
                 {"given_up", finding.given_up},
                 {"chain", json::array()}};
  for (const Wait& wait : finding.chain) result["chain"].push_back(wait_json(wait));
  if (finding.kind == Finding::Kind::mismatch) {
    result["variants"] = json::array();
    for (const auto& [call, ranks] : finding.variants)
      result["variants"].push_back(
          {{"ranks", ranks}, {"summary", call->summary}, {"call_site", call->call_site}});
  }
  return result;
}

json group_json(const Group& group) {
  json ranks = json::array();
  for (const auto& [rank, position] : group.positions) {
    json one = {{"rank", rank},
                {"host", position.dump->host},
                {"pid", position.dump->pid},
                {"wall_clock", position.dump->wall_clock},
                {"last_sequence", position.dump->last_sequence},
                {"in_call", position.in_call || position.transfer != nullptr},
                {"reason", position.dump->cause.reason}};
    if (position.call != nullptr) one["call"] = call_json(*position.call, *position.dump);
    if (position.transfer != nullptr)
      one["transfer"] = call_json(*position.transfer, *position.dump);
    if (const auto& progress = position.dump->progress)
      one["progress"] = {{"step", progress->step}, {"phase", progress->phase}};
    ranks.push_back(std::move(one));
  }
  std::vector<int> missing;
  for (const int member : group.members)
    if (!group.positions.contains(member)) missing.push_back(member);
  return {{"name", group.name},       {"generation", group.generation},
          {"members", group.members}, {"ranks", std::move(ranks)},
          {"no_dump", missing},       {"in_trouble", group.in_trouble()}};
}

json report_json(const std::vector<Dump>& dumps) {
  const Standing standing = standing_of(dumps);
  json result = {{"hangs", hangs(dumps)},
                 {"verdict", dumps.empty() ? "" : verdict(standing)},
                 {"silent", standing.silent},
                 {"findings", json::array()},
                 {"groups", json::array()}};
  for (const Finding& finding : diagnose(standing))
    result["findings"].push_back(finding_json(finding));
  for (const Group& group : standing.groups) result["groups"].push_back(group_json(group));
  return result;
}

std::string text_of(const json& value) {
  return value.dump(2, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace

std::string merged_report_json(const std::vector<Dump>& dumps) {
  return text_of(report_json(dumps));
}

std::string merged_report_json(const Evidence& evidence) {
  json result = report_json(evidence.dumps);
  result["left_out"] = evidence.left_out;
  return text_of(result);
}

}  // namespace lockstep::flight
