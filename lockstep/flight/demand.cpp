#include <lockstep/flight/demand.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <system_error>

#include <sys/syscall.h>
#include <unistd.h>

#include <spdlog/fmt/fmt.h>

namespace lockstep::flight {

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
