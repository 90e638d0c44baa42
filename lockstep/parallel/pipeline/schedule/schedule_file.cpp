#include <lockstep/parallel/pipeline/schedule/schedule_file.h>

#include <algorithm>
#include <set>

#include <spdlog/fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/error.h>
#include <lockstep/base/file.h>
#include <lockstep/parallel/pipeline/schedule/schedule.h>

namespace lockstep::pipeline {

namespace {

using nlohmann::json;

constexpr std::string_view kFormat = "lockstep-schedule";
constexpr int kVersion = 1;
constexpr std::string_view kKeys[] = {"format",        "version",       "name",
                                      "micro_batches", "rank_of_stage", "ranks"};
constexpr std::size_t kLargestFile = 64 << 20;
constexpr std::size_t kLongestName = 60;
constexpr int kMost = 1 << 22;  // stages, ranks, micro-batches

// A short piece of the file for a message, without characters that could control a terminal.
std::string shown_in_quotes(std::string_view text) {
  constexpr std::size_t kMostShown = 24;
  std::string shown(text.substr(0, kMostShown));
  for (char& c : shown)
    if (c < 0x20 || c > 0x7e) c = '?';
  return fmt::format("'{}{}'", shown, text.size() > kMostShown ? "…" : "");
}

class Reader {
 public:
  Reader(std::string_view text, const std::string& file) : file_(file), root_(parse(text)) {}

  Schedule read() const {
    if (!root_.is_object()) fail("not an object");
    for (const auto& [key, value] : root_.items())
      if (std::ranges::find(kKeys, key) == std::end(kKeys))
        fail(fmt::format("the key {} is not known", shown_in_quotes(key)));
    if (text_at("format") != kFormat) fail(fmt::format("'format' is not '{}'", kFormat));
    if (integer(at("version"), "'version'", 0) != kVersion)
      fail(fmt::format("'version' is not {}, the only one that this build knows", kVersion));
    Schedule schedule;
    schedule.name = name();
    schedule.num_micro_batches = integer(at("micro_batches"), "'micro_batches'", 1);
    for (const json& rank : array_at("rank_of_stage"))
      schedule.rank_of_stage.push_back(integer(rank, "a rank in 'rank_of_stage'", 0));
    for (const json& line : array_at("ranks")) {
      const int rank = schedule.num_ranks();
      if (!line.is_string()) fail(fmt::format("rank {}: not a text", rank));
      schedule.actions.push_back(actions(line.get_ref<const std::string&>(), rank));
    }
    try {
      check(schedule);
    } catch (const UsageError& error) {
      fail(error.what());
    }
    return schedule;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw UsageError("{}: {}", file_, what); }

  json parse(std::string_view text) const {
    std::set<std::string> keys;
    // A schedule is an object that holds arrays.
    const auto watch = [&](int depth, json::parse_event_t event, const json& parsed) {
      if (depth > 2 || (depth > 0 && event == json::parse_event_t::object_start))
        fail("nested deeper than a schedule is");
      if (event == json::parse_event_t::key) {
        const auto& key = parsed.get_ref<const std::string&>();
        if (!keys.insert(key).second)
          fail(fmt::format("the key {} is there twice", shown_in_quotes(key)));
      }
      return true;
    };
    // The parser would take a zero byte for the end.
    if (const auto zero = text.find('\0'); zero != std::string_view::npos)
      throw UsageError("{}, byte {}: not valid JSON", file_, zero + 1);
    try {
      return json::parse(text, watch);
    } catch (const json::parse_error& problem) {
      throw UsageError("{}, byte {}: not valid JSON", file_, problem.byte);
    } catch (const json::out_of_range&) {
      fail("has a number that is too large");
    }
  }

  const json& at(std::string_view key) const {
    const auto found = root_.find(std::string(key));
    if (found == root_.end()) fail(fmt::format("the key '{}' is missing", key));
    return *found;
  }
  const json& array_at(std::string_view key) const {
    const json& value = at(key);
    if (!value.is_array()) fail(fmt::format("'{}' is not an array", key));
    return value;
  }
  const std::string& text_at(std::string_view key) const {
    const json& value = at(key);
    if (!value.is_string()) fail(fmt::format("'{}' is not a text", key));
    return value.get_ref<const std::string&>();
  }
  int integer(const json& value, std::string_view what, int lowest) const {
    // A negative number has another type.
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() > kMost ||
        value.get<int>() < lowest)
      fail(fmt::format("{} is not a whole number from {} to {}", what, lowest, kMost));
    return value.get<int>();
  }
  // The name is shown in drawings and on terminals, so only printable ASCII is allowed.
  std::string name() const {
    const std::string& name = text_at("name");
    if (name.empty() || name.size() > kLongestName ||
        std::ranges::any_of(name, [](char c) { return c < 0x20 || c > 0x7e; }))
      fail(fmt::format("'name' is not a text of 1 to {} ASCII characters", kLongestName));
    return name;
  }

  // Actions are separated by blanks.
  std::vector<Action> actions(std::string_view line, int rank) const {
    std::vector<Action> actions;
    for (std::size_t at = line.find_first_not_of(' '); at != std::string_view::npos;) {
      const std::size_t end = std::min(line.find(' ', at), line.size());
      const std::string_view word = line.substr(at, end - at);
      const auto action = parse_action(word);
      if (!action)
        fail(fmt::format("rank {}, action {}: {} is none; they look like F0.3, B0.3, I0.3, W0.3, "
                         "SA0.3, RA0.3, SG0.3 and RG0.3",
                         rank, actions.size(), shown_in_quotes(word)));
      actions.push_back(*action);
      at = line.find_first_not_of(' ', end);
    }
    return actions;
  }

  const std::string& file_;
  json root_;
};

}  // namespace

std::string to_text(const Schedule& schedule) {
  std::vector<std::string> lines;
  for (const auto& actions : schedule.actions) {
    std::string line;
    for (const Action& action : actions) {
      if (!line.empty()) line += ' ';
      line += to_text(action);
    }
    lines.push_back(fmt::format("    \"{}\"", line));
  }
  return fmt::format("{{\n"
                     "  \"format\": \"{}\",\n"
                     "  \"version\": {},\n"
                     "  \"name\": {},\n"
                     "  \"micro_batches\": {},\n"
                     "  \"rank_of_stage\": [{}],\n"
                     "  \"ranks\": [\n{}\n  ]\n"
                     "}}\n",
                     kFormat, kVersion, json(schedule.name).dump(), schedule.num_micro_batches,
                     fmt::join(schedule.rank_of_stage, ", "), fmt::join(lines, ",\n"));
}

Schedule parse_schedule(std::string_view text, const std::string& file) {
  return Reader(text, file).read();
}

void write_schedule(const std::filesystem::path& path, const Schedule& schedule) {
  write_durably(path, to_text(schedule));
}

Schedule read_schedule(const std::filesystem::path& path) {
  const MappedFile file(path);
  if (file.size() > kLargestFile)
    throw UsageError("'{}' has {} bytes; a schedule has at most {}", path.string(), file.size(),
                     kLargestFile);
  const auto bytes = file.bytes();
  return parse_schedule({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path.string());
}

}  // namespace lockstep::pipeline
