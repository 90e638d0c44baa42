// A pipeline schedule's file.
#include <string>

#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/schedule/schedule_file.h>
#include <lockstep/parallel/pipeline/schedule/timeline.h>

#include "target.h"

namespace lockstep::fuzz {

void run(std::span<const std::byte> input) {
  const std::string_view text(reinterpret_cast<const char*>(input.data()), input.size());
  pipeline::Schedule schedule;
  try {
    schedule = pipeline::parse_schedule(text, "schedule 'fuzzed'");
  } catch (const UsageError& error) {
    const std::string_view what = error.what();
    require(what.starts_with("schedule 'fuzzed'"), "a message names the file");
    require(what.size() < 1500, "a message is short");
    return;
  }
  require(pipeline::simulate(schedule).makespan() > 0, "what is accepted can be run");
  require(pipeline::parse_schedule(pipeline::to_text(schedule), "again") == schedule,
          "what is read can be kept");
}

}  // namespace lockstep::fuzz
