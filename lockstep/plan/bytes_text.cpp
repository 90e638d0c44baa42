#include <lockstep/plan/bytes_text.h>

#include <cctype>
#include <charconv>

#include <spdlog/fmt/fmt.h>

#include <lockstep/base/error.h>

namespace lockstep::plan {

namespace {

constexpr double kMost = 0x1p62;

// Of "GiB", "gb" or "G"; 0 where it is no unit. A letter alone is 1024s, as of `docker run -m`.
double factor_of(std::string_view unit) {
  if (unit.empty() || unit == "B" || unit == "b") return 1;
  constexpr std::string_view kLetters = "kmgtp";
  const auto power = kLetters.find(static_cast<char>(std::tolower(unit.front())));
  if (power == kLetters.npos) return 0;
  std::string rest;
  for (const char letter : unit.substr(1))
    rest += static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  if (rest != "" && rest != "b" && rest != "ib") return 0;
  const double base = rest == "b" ? 1000 : 1024;
  double factor = 1;
  for (std::size_t i = 0; i <= power; ++i) factor *= base;
  return factor;
}

}  // namespace

std::string bytes_text(double bytes) {
  constexpr double kKiB = 1 << 10;
  for (const auto& [unit, size] :
       {std::pair("TiB", kKiB * kKiB * kKiB * kKiB), std::pair("GiB", kKiB * kKiB * kKiB),
        std::pair("MiB", kKiB * kKiB), std::pair("KiB", kKiB)})
    if (bytes >= size) return fmt::format("{:.1f} {}", bytes / size, unit);
  return fmt::format("{:.0f} bytes", bytes);
}

std::int64_t parse_bytes(std::string_view text, std::string_view what) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  const double bytes = number * factor_of(unit);
  // A NaN is refused, too.
  if (error != std::errc() || !(bytes >= 1 && bytes < kMost))
    throw UsageError("{} is '{}': it must be an amount of memory, as 80GiB, 24GB or 512MiB", what,
                     text);
  return static_cast<std::int64_t>(bytes);
}

}  // namespace lockstep::plan
