#include <lockstep/deferred/log.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::deferred {

namespace {

// To the bit, in any type.
bool is_zero(const c10::IValue& value) {
  if (!value.isInt() && !value.isDouble() && !value.isBool()) return false;
  const double number = value.toScalar().toDouble();
  return number == 0 && !std::signbit(number);
}

// Whether the memory that this writes to is all zeros then.
bool leaves_zeros(const Record& record) {
  if (!record.results.empty() || record.deferred.front().access != Access::overwrite) return false;
  const std::string& name = record.op.schema().name();
  if (name == "aten::zero_") return true;
  if (name == "aten::fill_") return is_zero(record.arguments[1]);
  return name == "aten::copy_" && record.deferred.size() == 2 &&
         record.deferred[1].region.memory->blank;
}

}  // namespace

void Log::append(Record record) {
  const std::size_t number = next_++;
  const bool blank = leaves_zeros(record);
  for (Memory* const memory : record.outputs()) {
    memory->writers.push_back(number);
    memory->blank = blank;
  }
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

bool has_content_for(const Memory& memory, std::size_t number) {
  return memory.holds_content() && (memory.writers.empty() || memory.writers.back() < number);
}

}  // namespace lockstep::deferred
