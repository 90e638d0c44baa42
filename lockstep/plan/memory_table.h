// Estimates as a table for people.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include <lockstep/plan/memory_estimate.h>

namespace lockstep::plan {

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
