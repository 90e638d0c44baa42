#include <lockstep/observe/terminal.h>

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <string>

#include <lockstep/base/environment.h>

namespace lockstep::observe {

bool is_live_terminal(int fd) {
  return ::isatty(fd) == 1 && environment_variable("TERM").value_or("dumb") != "dumb";
}

int terminal_width(int fd, int otherwise) {
  winsize size{};
  if (::ioctl(fd, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return otherwise;
  return size.ws_col;
}

Characters locale_characters() {
  std::string locale;
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    if (locale.empty()) locale = environment_variable(name).value_or("");
  }
  std::ranges::transform(locale, locale.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const char* wide : {"zh", "ja", "ko"}) {
    if (locale.starts_with(wide)) return Characters::ascii;
  }
  const bool utf8 =
      locale.find("utf-8") != std::string::npos || locale.find("utf8") != std::string::npos;
  return utf8 ? Characters::unicode : Characters::ascii;
}

Colour wanted_colour() { return environment_variable("NO_COLOR") ? Colour::none : Colour::basic; }

}  // namespace lockstep::observe
