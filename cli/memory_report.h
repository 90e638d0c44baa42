// What `lockstep plan memory` tells.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/plan/text.h>

namespace lockstep::cli {

// As the flags have it.
struct MemorySettings {
  std::string config;
  std::vector<std::string> overrides;
  std::string ranks = "1,2,4,8";
  std::string ranks_per_host = "8";
  std::string device_memory;
  std::string device;
  std::string precision;  // where not given, the config's, or fp32
  std::string offload;    // where not given, the config's, or none
  std::string parameters;
};

// What a table is made of.
struct MemoryReport {
  std::string about;               // a line
  std::vector<std::string> notes;  // below it
  std::vector<plan::MemoryRow> rows;
  std::optional<std::int64_t> device_bytes;
};

// Each strategy on each number of ranks. UsageError for what makes no sense.
MemoryReport memory_of_config(const MemorySettings& settings);
// From a number of parameters alone.
MemoryReport memory_of_parameters(const MemorySettings& settings);

std::string to_json(const MemoryReport& report);

}  // namespace lockstep::cli
