// Schedules as files that people read, compare and change: JSON, with a line for each rank.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include <lockstep/parallel/pipeline/schedule/schedule.h>

namespace lockstep::pipeline {

std::string to_text(const Schedule& schedule);

// Returns a schedule that passed check(). For anything else it throws UsageError, which begins with
// `file` and names the rank and the action.
Schedule parse_schedule(std::string_view text, const std::string& file);

// The file is complete or does not exist. FileError where the disk cannot take it.
void write_schedule(const std::filesystem::path& path, const Schedule& schedule);

// UsageError where the file is missing, unreadable, too large, or parse_schedule() refuses it.
Schedule read_schedule(const std::filesystem::path& path);

}  // namespace lockstep::pipeline
