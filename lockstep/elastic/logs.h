// Files that hold ranks' output: torchrun's --log-dir, --redirects and --tee.
#pragma once

#include <filesystem>
#include <map>
#include <string>

namespace lockstep::elastic {

// Which streams of a rank: a set of bits, as torchrun numbers them.
enum class Streams { none = 0, output = 1, error = 2, both = 3 };

// "3" for all ranks, or "0:1,1:2" by local rank.
class StreamChoice {
 public:
  StreamChoice() = default;

  // UsageError that names `flag` where the text is neither, or names a rank that is not one of
  // this host's.
  static StreamChoice parse(const std::string& text, const std::string& flag, int num_ranks);

  Streams of(int local_rank) const;
  bool any() const;

 private:
  Streams all_ = Streams::none;
  std::map<int, Streams> by_rank_;
};

constexpr bool includes(Streams set, Streams one) {
  return (static_cast<int>(set) & static_cast<int>(one)) != 0;
}

// A new directory `<base>/<run_id>_<random>`; an empty base means the system's temporary directory.
// UsageError where it cannot be made.
std::filesystem::path make_log_directory(const std::string& base, const std::string& run_id);

}  // namespace lockstep::elastic
