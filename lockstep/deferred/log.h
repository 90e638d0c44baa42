// What has been put off, in the order in which it was called.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <span>

#include <lockstep/deferred/record.h>

namespace lockstep::deferred {

// Threading: one at a time; it also changes `writers` and `blank` of the memories in its records.
class Log {
 public:
  using Numbers = std::set<std::size_t>;

  void append(Record record);
  const Record& at(std::size_t number) const { return records_.at(number); }

  // The records that have to run, in order, for these memories to have the content that they would
  // have by now. What a memory that holds its content was made from is not among them.
  Numbers needed_for(std::span<const Memory* const> memories) const;

  // Drops what none of these memories needs, whatever they hold by now.
  void forget_all_but(std::span<const Memory* const> memories);

 private:
  enum class Held { is_there, is_made_again };
  Numbers needed_for(std::span<const Memory* const> memories, Held held) const;

  std::map<std::size_t, Record> records_;
  std::size_t next_ = 0;
};

// Whether a memory that holds its content has what a record of this number reads there.
bool has_content_for(const Memory& memory, std::size_t number);

}  // namespace lockstep::deferred
