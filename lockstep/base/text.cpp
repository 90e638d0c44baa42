#include <lockstep/base/text.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include <spdlog/fmt/fmt.h>

namespace lockstep {

namespace {

// Letters to insert, delete or change to turn one word into the other.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0]++;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string_view nearest_word(std::string_view word, std::span<const std::string_view> known) {
  std::string_view nearest;
  std::size_t best = std::max<std::size_t>(2, word.size() / 2) + 1;
  for (const std::string_view candidate : known) {
    // The beginning of a word is meant as that word, however long the rest is.
    const bool begins = word.size() > 2 && candidate.starts_with(word);
    const std::size_t how_far = begins ? 1 : distance(word, candidate);
    if (how_far < best) {
      best = how_far;
      nearest = candidate;
    }
  }
  return nearest;
}

std::string did_you_mean(std::string_view word, std::span<const std::string_view> known) {
  const std::string_view nearest = nearest_word(word, known);
  return nearest.empty() ? "" : fmt::format(": did you mean '{}'?", nearest);
}

std::string count_text(double count) {
  if (count >= 1e9) return fmt::format("{:.2f} B", count / 1e9);
  if (count >= 1e6) return fmt::format("{:.1f} M", count / 1e6);
  if (count >= 1e3) return fmt::format("{:.1f} k", count / 1e3);
  return fmt::format("{:.0f}", count);
}

}  // namespace lockstep
