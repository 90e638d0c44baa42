// Texts from files as messages show them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace lockstep::checkpoint {

// The text in quotes; a long one is cut, and characters that could move a terminal's cursor are
// spelt out.
std::string quote(std::string_view text);

// "[2, 3]"; a long one is cut.
std::string shape_text(std::span<const std::int64_t> shape);

// Collects things of one kind that do not fit. Counts all, and names the first few.
class Mismatches {
 public:
  explicit Mismatches(const char* kind) : kind_(kind) {}

  void add(const std::string& text);
  bool any() const { return count_ > 0; }
  // A line for a message, which begins with a line break; "" where there is none.
  std::string text() const;

 private:
  const char* kind_;
  std::size_t count_ = 0;
  std::string shown_;
};

}  // namespace lockstep::checkpoint
