// The width, characters and colours of a terminal, by its descriptor and the environment.
#pragma once

#include <cstdint>

namespace lockstep::observe {

enum class Characters : std::uint8_t { ascii, unicode };
enum class Colour : std::uint8_t { none, basic };

// Whether this is a terminal that understands escape sequences.
bool is_live_terminal(int fd);

// The terminal's columns now; `otherwise` where it does not tell them.
int terminal_width(int fd, int otherwise = 80);

// Decided by LC_ALL, LC_CTYPE and LANG. Chinese, Japanese and Korean terminals may draw the
// characters of a bar two columns wide, so they get ASCII.
Characters locale_characters();

// Colour::none where NO_COLOR is set (https://no-color.org).
Colour wanted_colour();

}  // namespace lockstep::observe
