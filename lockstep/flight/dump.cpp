#include <lockstep/flight/dump.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <fstream>
#include <limits>
#include <sstream>
#include <system_error>

#include <spdlog/fmt/fmt.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/base/log.h>

namespace lockstep::flight {

namespace {

using nlohmann::json;

constexpr const char* kFormat = "lockstep-flight";
constexpr int kVersion = 1;
constexpr const char* kPrefix = "flight-";
constexpr const char* kSuffix = ".json";

constexpr std::uintmax_t kLargestFile = 64 << 20;
constexpr std::size_t kMostEntries = 1 << 20;
constexpr std::size_t kMostMembers = 1 << 20;
constexpr std::size_t kMostPeers = 4;
constexpr std::size_t kLongestText = 64 << 10;
constexpr int kDeepest = 4;

std::string host_name() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0) return "unknown";
  return name;
}

std::string wall_clock_now() {
  using namespace std::chrono;
  const auto now = system_clock::now();
  const std::time_t seconds = system_clock::to_time_t(now);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  const auto millis = duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count();
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", utc.tm_year + 1900,
                     utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec,
                     millis % 1000);
}

void write_file(const Dump& dump, const std::filesystem::path& directory) {
  std::filesystem::create_directories(directory);
  const std::string file_name = dump_file_name(dump);
  const auto temporary =
      directory / fmt::format(".{}.{}-{}", file_name, getpid(), syscall(SYS_gettid));
  const std::string text = to_text(dump);
  errno = 0;
  std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  out.close();
  std::error_code error;
  if (!out) error.assign(errno != 0 ? errno : EIO, std::generic_category());
  if (out) std::filesystem::rename(temporary, directory / file_name, error);
  if (error) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw UsageError("{}: {}", temporary.string(), error.message());
  }
}

// Reads the fields of a dump and knows where it is, for messages.
class Reader {
 public:
  Reader(const std::filesystem::path& path, const json& value, std::string place)
      : path_(path), value_(value), place_(std::move(place)) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw UsageError("flight dump {}, {}: {}", path_.string(), place_, what);
  }

  Reader at(const char* key) const {
    if (!value_.is_object()) fail("not an object");
    const auto found = value_.find(key);
    if (found == value_.end()) fail(fmt::format("'{}' is missing", key));
    return Reader(path_, *found, place_ == "top level" ? key : fmt::format("{}.{}", place_, key));
  }

  bool has(const char* key) const { return value_.is_object() && value_.contains(key); }

  Reader at(std::size_t index) const {
    return Reader(path_, value_[index], fmt::format("{}[{}]", place_, index));
  }

  std::size_t length(std::size_t most) const {
    if (!value_.is_array()) fail("not a list");
    if (value_.size() > most)
      fail(fmt::format("{} elements; at most {} are accepted", value_.size(), most));
    return value_.size();
  }

  std::string text() const {
    if (!value_.is_string()) fail("not a text");
    const auto& text = value_.get_ref<const std::string&>();
    if (text.size() > kLongestText)
      fail(fmt::format("{} bytes of text; at most {} are accepted", text.size(), kLongestText));
    return text;
  }

  template <typename Integer>
  Integer integer(std::int64_t lowest = 0,
                  std::uint64_t highest = std::numeric_limits<Integer>::max()) const {
    const bool fits =
        value_.is_number_unsigned()
            ? value_.get<std::uint64_t>() <= highest &&
                  (lowest <= 0 || value_.get<std::uint64_t>() >= static_cast<std::uint64_t>(lowest))
            : value_.is_number_integer() && value_.get<std::int64_t>() >= lowest;
    if (!fits)
      fail(fmt::format("{} is not a whole number from {} to {}",
                       value_.dump(-1, ' ', true, json::error_handler_t::replace).substr(0, 40),
                       lowest, highest));
    return value_.get<Integer>();
  }

 private:
  const std::filesystem::path& path_;
  const json& value_;
  std::string place_;
};

std::vector<int> read_ranks(const Reader& reader, std::size_t most) {
  std::vector<int> ranks;
  const std::size_t count = reader.length(most);
  for (std::size_t i = 0; i < count; ++i) ranks.push_back(reader.at(i).integer<int>());
  return ranks;
}

Entry read_entry(const Reader& reader) {
  Entry entry;
  entry.number = reader.at("number").integer<std::uint64_t>(1);
  entry.sequence = reader.at("sequence").integer<std::uint64_t>();
  entry.operation = reader.at("operation").text();
  entry.summary = reader.at("summary").text();
  entry.call_site = reader.at("call_site").text();
  if (reader.has("peers")) entry.peers = read_ranks(reader.at("peers"), kMostPeers);
  const std::string state = reader.at("state").text();
  const State states[] = {State::queued, State::started, State::finished, State::failed};
  const auto known =
      std::find_if(std::begin(states), std::end(states), [&](State s) { return state == name(s); });
  if (known == std::end(states))
    reader.at("state").fail(fmt::format("'{}' is no state of a call", state.substr(0, 40)));
  entry.state = *known;
  entry.queued_ns = reader.at("queued_ns").integer<std::int64_t>();
  entry.started_ns = reader.at("started_ns").integer<std::int64_t>();
  entry.finished_ns = reader.at("finished_ns").integer<std::int64_t>();
  return entry;
}

std::string read_file(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    throw UsageError("flight dump {}: no such file", path.string());
  const auto size = std::filesystem::file_size(path, error);
  if (error || size > kLargestFile)
    throw UsageError("flight dump {}: {} bytes; at most {} are accepted", path.string(), size,
                     kLargestFile);
  std::ifstream in(path, std::ios::binary);
  std::string text(static_cast<std::size_t>(size), '\0');
  in.read(text.data(), static_cast<std::streamsize>(size));
  if (!in) throw UsageError("flight dump {}: cannot be read", path.string());
  return text;
}

// Refuses JSON that is nested deeper than a dump: it would take many times the file's size in
// memory, and as much stack to print.
json parse_json(std::string_view text, const std::filesystem::path& path) {
  const auto check_depth = [&](int depth, json::parse_event_t, const json&) {
    if (depth > kDeepest)
      throw UsageError("flight dump {}: nested deeper than the {} levels of a dump", path.string(),
                       kDeepest);
    return true;
  };
  try {
    return json::parse(text, check_depth);
  } catch (const json::parse_error& problem) {
    throw UsageError("flight dump {}, byte {}: not valid JSON", path.string(), problem.byte);
  } catch (const json::out_of_range&) {
    throw UsageError("flight dump {}: has a number that is too large", path.string());
  }
}

}  // namespace

std::string to_text(const Dump& dump) {
  json entries = json::array();
  for (const Entry& entry : dump.entries) {
    entries.push_back({{"number", entry.number},
                       {"sequence", entry.sequence},
                       {"operation", entry.operation},
                       {"summary", entry.summary},
                       {"call_site", entry.call_site},
                       {"state", name(entry.state)},
                       {"queued_ns", entry.queued_ns},
                       {"started_ns", entry.started_ns},
                       {"finished_ns", entry.finished_ns}});
    if (!entry.peers.empty()) entries.back()["peers"] = entry.peers;
  }
  json root = {{"format", kFormat},
               {"version", kVersion},
               {"host", dump.host},
               {"pid", dump.pid},
               {"global_rank", dump.global_rank()},
               {"group", dump.group},
               {"generation", dump.generation},
               {"rank", dump.rank},
               {"members", dump.members},
               {"reason", dump.cause.reason},
               {"wall_clock", dump.wall_clock},
               {"now_ns", dump.now_ns},
               {"last_sequence", dump.last_sequence},
               {"entries", std::move(entries)}};
  if (!dump.cause.fault.empty()) root["fault"] = dump.cause.fault;
  if (!dump.cause.at_fault.empty()) root["at_fault"] = dump.cause.at_fault;
  if (dump.as_of_ns != 0) root["as_of_ns"] = dump.as_of_ns;
  if (dump.progress)
    root["progress"] = {{"step", dump.progress->step},
                        {"phase", dump.progress->phase},
                        {"noted_ns", dump.progress->noted_ns}};
  // A reason may quote bytes that are no UTF-8; that must not cost us the dump.
  return root.dump(1, ' ', false, json::error_handler_t::replace);
}

Dump take_dump(const Recorder& recorder, const Cause& cause) {
  Dump dump;
  dump.host = host_name();
  dump.pid = getpid();
  dump.group = recorder.group();
  dump.generation = recorder.generation();
  dump.rank = recorder.rank();
  dump.members = recorder.global_ranks();
  dump.cause = cause;
  dump.cause.reason.resize(std::min(cause.reason.size(), kLongestText / 4));
  dump.wall_clock = wall_clock_now();
  dump.as_of_ns = wall_clock_ns();
  dump.entries = recorder.entries();
  dump.last_sequence = recorder.last_sequence();
  dump.now_ns = now_ns();
  return dump;
}

std::string dump_file_name(const Dump& dump) {
  // Two groups may carry one name and differ in members; the hash tells their files apart.
  std::string identity = fmt::format("{}/{}", dump.group, dump.generation);
  for (const int member : dump.members) identity += fmt::format("/{}", member);
  std::string readable = dump.group.substr(0, 64);
  for (char& c : readable) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (!plain && c != '_') c = '_';
  }
  return fmt::format("{}{}-{:08x}.rank{}{}", kPrefix, readable,
                     static_cast<std::uint32_t>(hash_text(identity)), dump.global_rank(), kSuffix);
}

bool write_dump(const Dump& dump, const std::filesystem::path& directory) noexcept {
  try {
    try {
      write_file(dump, directory);
      return true;
    } catch (const std::exception& error) {
      log::warn("the flight recorder's dump of group '{}' could not be written: {}", dump.group,
                error.what());
    }
  } catch (...) {
    // Out of memory while saying so: the error that brought us here is the one to report.
  }
  return false;
}

bool write_dump(const Recorder& recorder, const std::filesystem::path& directory,
                const Cause& cause) noexcept {
  try {
    return write_dump(take_dump(recorder, cause), directory);
  } catch (...) {
    return false;  // out of memory
  }
}

Dump read_dump(const std::filesystem::path& path) { return parse_dump(read_file(path), path); }

Dump parse_dump(std::string_view text, const std::filesystem::path& path) {
  const json root = parse_json(text, path);
  const Reader top(path, root, "top level");
  if (top.at("format").text() != kFormat)
    top.at("format").fail("this is not a dump of Lockstep's flight recorder");
  if (const auto version = top.at("version").integer<int>(); version != kVersion)
    top.at("version").fail(fmt::format("version {}; this program reads {}", version, kVersion));

  Dump dump;
  dump.host = top.at("host").text();
  dump.pid = top.at("pid").integer<std::int64_t>();
  dump.group = top.at("group").text();
  dump.generation = top.at("generation").integer<std::uint32_t>();
  const Reader members = top.at("members");
  dump.members = read_ranks(members, kMostMembers);
  if (dump.members.empty()) members.fail("a group has at least one member");
  dump.rank = top.at("rank").integer<int>(0, dump.members.size() - 1);
  dump.cause.reason = top.at("reason").text();
  if (top.has("fault")) dump.cause.fault = top.at("fault").text();
  if (top.has("at_fault")) dump.cause.at_fault = read_ranks(top.at("at_fault"), kMostMembers);
  if (top.has("as_of_ns")) dump.as_of_ns = top.at("as_of_ns").integer<std::int64_t>();
  if (top.has("progress")) {
    const Reader progress = top.at("progress");
    dump.progress = Progress{.step = progress.at("step").integer<std::uint64_t>(),
                             .phase = progress.at("phase").text(),
                             .noted_ns = progress.at("noted_ns").integer<std::int64_t>()};
  }
  dump.wall_clock = top.at("wall_clock").text();
  dump.now_ns = top.at("now_ns").integer<std::int64_t>();
  dump.last_sequence = top.at("last_sequence").integer<std::uint64_t>();
  const Reader entries = top.at("entries");
  const std::size_t num_entries = entries.length(kMostEntries);
  for (std::size_t i = 0; i < num_entries; ++i) {
    dump.entries.push_back(read_entry(entries.at(i)));
    if (i > 0 && dump.entries[i].number <= dump.entries[i - 1].number)
      entries.at(i).at("number").fail("entries must be in ascending order");
  }
  return dump;
}

std::vector<std::filesystem::path> list_dumps(const std::filesystem::path& directory) {
  std::vector<std::filesystem::path> result;
  std::error_code error;
  for (auto it = std::filesystem::directory_iterator(directory, error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    const std::string file_name = it->path().filename().string();
    if (file_name.starts_with(kPrefix) && file_name.ends_with(kSuffix))
      result.push_back(it->path());
  }
  std::sort(result.begin(), result.end());
  return result;
}

namespace {

constexpr std::size_t kLongestDemand = 256;
constexpr std::int64_t kOneTimeNs = 10'000'000'000;

const char* word_for(Demand::Why why) { return why == Demand::Why::failed ? "failed" : "asked"; }

}  // namespace

std::int64_t wall_clock_ns() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

bool is_old(std::int64_t then, std::int64_t now) { return now - then > kOneTimeNs; }

std::int64_t demand_dumps(const std::filesystem::path& directory, Demand::Why why,
                          std::uint32_t generation) noexcept {
  try {
    const std::int64_t round = wall_clock_ns();
    const auto temporary = directory / fmt::format(".{}.{}", kDemandFile, syscall(SYS_gettid));
    std::ofstream out(temporary, std::ios::trunc);
    out << fmt::format("{} {} {}\n", word_for(why), generation, round);
    out.close();
    std::error_code error;
    if (out) std::filesystem::rename(temporary, directory / kDemandFile, error);
    if (out && !error) return round;
    std::filesystem::remove(temporary, error);
  } catch (...) {
    // Others' dumps would have been good to have; what failed is reported without them.
  }
  return 0;
}

std::optional<Demand> current_demand(const std::filesystem::path& directory) {
  std::ifstream in(directory / kDemandFile, std::ios::binary);
  std::string text(kLongestDemand, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(in.gcount()));
  std::istringstream words(text);
  std::string why;
  Demand demand;
  if (!(words >> why >> demand.generation >> demand.round) || demand.round <= 0)
    return std::nullopt;
  if (why == word_for(Demand::Why::failed))
    demand.why = Demand::Why::failed;
  else if (why != word_for(Demand::Why::asked))
    return std::nullopt;
  return demand;
}

}  // namespace lockstep::flight
