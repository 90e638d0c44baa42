#include <lockstep/recovery/load_together.h>

#include <algorithm>
#include <exception>
#include <set>
#include <sstream>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/checkpoint/safetensors/quote.h>

namespace lockstep {

Outcome outcome_of(const std::function<std::string()>& work) {
  try {
    return {.kind = Outcome::Kind::done, .text = work()};
  } catch (const checkpoint::DamagedCheckpoint& damage) {
    return {.kind = Outcome::Kind::found_damage, .text = damage.what()};
  } catch (const std::exception& error) {
    return {.kind = Outcome::Kind::failed, .text = error.what()};
  }
}

std::vector<Outcome> tell_all(const RankMessages& ranks, const Outcome& mine) {
  std::vector<Outcome> all;
  for (const std::string& one : ranks.gather(static_cast<char>(mine.kind) + mine.text))
    all.push_back({.kind = static_cast<Outcome::Kind>(one.front()), .text = one.substr(1)});
  return all;
}

namespace {

// Stored tensors that no rank wants.
std::string unexpected(const RankMessages& ranks, const checkpoint::StoredTensors& stored,
                       const std::vector<mesh::HeldTensor>& tensors,
                       const std::vector<std::string>& complete) {
  std::string names;
  for (const mesh::HeldTensor& tensor : tensors) names += tensor.name + '\n';
  std::set<std::string> known;
  for (const std::string& text : ranks.gather(names)) {
    std::istringstream lines(text);
    for (std::string name; std::getline(lines, name);) known.insert(name);
  }
  std::vector<std::string> others;
  const auto is_below = [&](const std::string& name) {
    return std::ranges::any_of(complete,
                               [&](const std::string& prefix) { return name.starts_with(prefix); });
  };
  for (const auto& [name, tensor] : stored)
    if (!known.contains(name) && is_below(name)) others.push_back(checkpoint::quote(name));
  constexpr std::size_t kNamed = 5;
  const std::size_t left_out = others.size() - std::min(others.size(), kNamed);
  others.resize(others.size() - left_out);
  if (others.empty()) return "";
  return fmt::format("it has {}{}, which this model has not", fmt::join(others, ", "),
                     left_out == 0 ? "" : fmt::format(" and {} more", left_out));
}

}  // namespace

std::vector<std::string> say_together(const RankMessages& ranks,
                                      const std::function<std::string()>& work) {
  std::vector<std::string> said;
  for (Outcome& one : tell_all(ranks, outcome_of(work))) {
    if (one.kind == Outcome::Kind::found_damage) throw checkpoint::DamagedCheckpoint(one.text);
    if (one.kind == Outcome::Kind::failed) throw UsageError(one.text);
    said.push_back(std::move(one.text));
  }
  return said;
}

void do_together(const RankMessages& ranks, const std::function<void()>& work) {
  say_together(ranks, [&] {
    work();
    return std::string();
  });
}

void check_fit_together(const RankMessages& ranks, const std::string& what,
                        const checkpoint::StoredTensors& stored,
                        const std::vector<mesh::HeldTensor>& tensors, const LoadOptions& options) {
  const std::string extra = unexpected(ranks, stored, tensors, options.complete);
  do_together(ranks, [&] {
    std::string fault = checkpoint::fit_fault(stored, tensors);
    if (!extra.empty()) fault += (fault.empty() ? "" : "; ") + extra;
    if (!fault.empty()) throw UsageError("{} does not fit this model: {}", what, fault);
  });
}

}  // namespace lockstep
