// Tests that need several ranks.
#pragma once

#include <cstdint>
#include <filesystem>

#include <lockstep/distributed/distributed.h>
#include <tests/ranks/cells.h>

namespace lockstep {

// These are for two ranks.
void check_two_ranks(const DistributedManager& dist, ranks::Cells& cells);
// A run that was interrupted goes on to the bit.
void check_resuming(const DistributedManager& dist, ranks::Cells& cells);
// A run that was left in the middle goes on from the copies in the ranks' memory. `config` is that
// of the job, which is formed anew for each run.
void check_copies_in_memory(const DistributedConfig& config, ranks::Cells& cells);
// For a job with ParallelMode::FSDP.
void check_fsdp(const DistributedManager& dist, ranks::Cells& cells);
// Continues the run in `output` to `max_steps` steps; every rank writes the samples that it had to
// a file of its own there.
void train_to(const DistributedManager& dist, const std::filesystem::path& output,
              std::int64_t max_steps);
// For any number of ranks, with a folder that they share: what a trainer does beside fit(), with
// every strategy; and checkpoints that those ranks left there.
void check_loops(ranks::Cells& cells, const std::filesystem::path& folder);
void check_resharded(ranks::Cells& cells, const std::filesystem::path& folder);
// The stages of a language model on two ranks, in 16 bits.
void check_stages_in_bf16(ranks::Cells& cells);

}  // namespace lockstep
