#include <lockstep/base/count_text.h>

#include <spdlog/fmt/fmt.h>

namespace lockstep {

std::string count_text(double count) {
  if (count >= 1e9) return fmt::format("{:.2f} B", count / 1e9);
  if (count >= 1e6) return fmt::format("{:.1f} M", count / 1e6);
  if (count >= 1e3) return fmt::format("{:.1f} k", count / 1e3);
  return fmt::format("{:.0f}", count);
}

}  // namespace lockstep
