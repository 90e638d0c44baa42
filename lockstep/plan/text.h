// Texts for people: sizes of memory, and a table of estimates.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include <lockstep/plan/memory_estimate.h>

namespace lockstep::plan {

// "13.0 GiB", "912.4 MiB".
std::string bytes_text(double bytes);

// "80GiB", "80 GB", "512MiB", "1.5T"; a number alone is bytes. UsageError naming `what` for
// anything else.
std::int64_t parse_bytes(std::string_view text, std::string_view what);

struct MemoryRow {
  int num_ranks = 1;
  ShardingStrategy strategy = ShardingStrategy::NO_SHARD;
  MemoryEstimate estimate = {};
  std::string verdict = {};  // whether it fits, in a word; no column where all are empty
  bool marked = false;       // with a star
};

// Rows of one number of ranks stand together. Columns that are empty or next to nothing are left
// out; 105 characters wide at most, where nothing is on another host.
std::string memory_table(std::span<const MemoryRow> rows);

}  // namespace lockstep::plan
