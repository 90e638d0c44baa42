#include <lockstep/deferred/log.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace lockstep::deferred {

void Log::append(Record record) {
  const std::size_t number = next_++;
  for (Memory* const memory : record.outputs()) memory->writers.push_back(number);
  records_.emplace(number, std::move(record));
}

Log::Numbers Log::needed_for(std::span<const Memory* const> memories) const {
  return needed_for(memories, Held::is_there);
}

Log::Numbers Log::needed_for(std::span<const Memory* const> memories, Held held) const {
  // A memory as it was before the record of that number.
  using Version = std::pair<const Memory*, std::size_t>;
  std::vector<Version> open;
  for (const Memory* const memory : memories) open.emplace_back(memory, next_);
  Numbers needed;
  while (!open.empty()) {
    const auto [memory, number] = open.back();
    open.pop_back();
    if (held == Held::is_there && has_content_for(*memory, number)) continue;
    const auto& writers = memory->writers;
    const auto after = std::lower_bound(writers.begin(), writers.end(), number);
    if (after == writers.begin()) continue;
    const std::size_t writer = *std::prev(after);
    if (!needed.insert(writer).second) continue;
    // A memory that the writer changes in part is among these, and leads on to the writer before.
    for (const Memory* const input : records_.at(writer).inputs()) open.emplace_back(input, writer);
  }
  return needed;
}

void Log::forget_all_but(std::span<const Memory* const> memories) {
  const Numbers needed = needed_for(memories, Held::is_made_again);
  for (auto item = records_.begin(); item != records_.end();) {
    const auto& [number, record] = *item;
    if (needed.count(number) != 0) {
      ++item;
      continue;
    }
    for (Memory* const memory : record.outputs()) std::erase(memory->writers, number);
    item = records_.erase(item);
  }
}

bool Log::is_blank(const Memory& memory) const {
  if (memory.writers.empty()) return true;
  const Record& last = records_.at(memory.writers.back());
  return last.op.schema().name() == "aten::zero_" &&
         last.deferred.front().access == Access::overwrite;
}

bool has_content_for(const Memory& memory, std::size_t number) {
  return memory.holds_content() && (memory.writers.empty() || memory.writers.back() < number);
}

}  // namespace lockstep::deferred
