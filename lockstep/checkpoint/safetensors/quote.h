// Texts from files as messages show them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace lockstep::checkpoint {

// In quotes; a long one is cut, and what could move a terminal's cursor is spelt out.
std::string quote(std::string_view text);

// "[2, 3]"; a long one is cut.
std::string shape_text(std::span<const std::int64_t> shape);

}  // namespace lockstep::checkpoint
