// Schedules as files that people read, compare and change: JSON, with a line for each rank.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include <lockstep/parallel/pipeline/schedule/schedule.h>

namespace lockstep::pipeline {

std::string to_text(const Schedule& schedule);

// A schedule that passed check(). UsageError that begins with `file` and names the rank and the
// action, for anything else.
Schedule parse_schedule(std::string_view text, const std::string& file);

// Complete or not there; FileError where the disk does not take it.
void write_schedule(const std::filesystem::path& path, const Schedule& schedule);

// UsageError where the file is missing, unreadable, too large, or parse_schedule() refuses it.
Schedule read_schedule(const std::filesystem::path& path);

}  // namespace lockstep::pipeline
