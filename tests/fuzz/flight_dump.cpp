// Dumps of the flight recorder, read for a report.
#include <string>

#include <lockstep/base/error.h>
#include <lockstep/flight/report.h>

#include "target.h"

namespace lockstep::fuzz {

void run(std::span<const std::byte> input) {
  const std::string_view text(reinterpret_cast<const char*>(input.data()), input.size());
  flight::Dump dump;
  try {
    dump = flight::parse_dump(text, "fuzzed");
  } catch (const UsageError& error) {
    const std::string_view what = error.what();
    require(what.starts_with("flight dump fuzzed"), "a message names the file");
    require(what.size() < 1000, "a message is short");
    return;
  }
  const std::string again = flight::to_text(dump);
  require(flight::to_text(flight::parse_dump(again, "again")) == again, "what is read can be kept");
  const std::string name = flight::dump_file_name(dump);
  require(name.find('/') == std::string::npos && name.size() < 256, "a file name is one");
  require(flight::merged_report({dump}).ends_with('\n'), "a report is written");
  require(!flight::merged_report({dump, dump}).empty(), "a report of two is written");
  require(flight::merged_report_json(std::vector{dump}).ends_with('\n'), "also for programs");
}

}  // namespace lockstep::fuzz
