#include <lockstep/elastic/logs.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>

namespace lockstep::elastic {

namespace fs = std::filesystem;

namespace {

bool parse_whole(std::string_view text, int highest, int& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 0 && value <= highest;
}

}  // namespace

StreamChoice StreamChoice::parse(const std::string& text, const std::string& flag, int num_ranks) {
  StreamChoice choice;
  int streams = 0;
  if (parse_whole(text, 3, streams)) {
    choice.all_ = static_cast<Streams>(streams);
    return choice;
  }
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const auto colon = entry.find(':');
    int rank = 0;
    if (colon == std::string::npos || !parse_whole(entry.substr(0, colon), 1 << 20, rank) ||
        !parse_whole(entry.substr(colon + 1), 3, streams))
      throw UsageError("{}: '{}' is neither a number from 0 to 3 (0 none, 1 standard output, 2 "
                       "standard error, 3 both) nor a list such as 0:1,1:3 by local rank",
                       flag, text);
    if (rank >= num_ranks)
      throw UsageError("{}: '{}' names local rank {}, and this host runs {} rank{}: they are "
                       "numbered from 0 to {}",
                       flag, text, rank, num_ranks, num_ranks == 1 ? "" : "s", num_ranks - 1);
    choice.by_rank_[rank] = static_cast<Streams>(streams);
  }
  return choice;
}

Streams StreamChoice::of(int local_rank) const {
  const auto found = by_rank_.find(local_rank);
  return found != by_rank_.end() ? found->second : all_;
}

bool StreamChoice::any() const {
  bool some = all_ != Streams::none;
  for (const auto& [rank, streams] : by_rank_) some |= streams != Streams::none;
  return some;
}

fs::path make_log_directory(const std::string& base, const std::string& run_id) {
  std::error_code failed;
  const fs::path parent = base.empty() ? temporary_directory() : base;
  fs::create_directories(parent, failed);
  std::string folder = run_id;  // a name that users choose need not be one of a file
  std::replace(folder.begin(), folder.end(), '/', '_');
  std::string name = (parent / (folder + "_XXXXXX")).string();
  if (failed || ::mkdtemp(name.data()) == nullptr)
    throw UsageError("cannot make a folder for logs in '{}': {}; check --log-dir", parent.string(),
                     failed ? failed.message() : std::strerror(errno));
  return name;
}

}  // namespace lockstep::elastic
