// What only several ranks can show.
#pragma once

#include <cstdint>
#include <filesystem>

#include <lockstep/distributed/distributed.h>
#include <tests/ranks/cells.h>

namespace lockstep {

// For two ranks.
void check_two_ranks(const DistributedManager& dist, ranks::Cells& cells);
// That a run which was interrupted goes on to the bit.
void check_resuming(const DistributedManager& dist, ranks::Cells& cells);
// That one which was left in the middle goes on from the copies in the ranks' memory. `config` is
// the job's, which is formed anew for each.
void check_copies_in_memory(const DistributedConfig& config, ranks::Cells& cells);
// Of a job with ParallelMode::FSDP.
void check_fsdp(const DistributedManager& dist, ranks::Cells& cells);
// Goes on with the run in `output` to so many steps; every rank writes the samples that it had to a
// file of its own there.
void train_to(const DistributedManager& dist, const std::filesystem::path& output,
              std::int64_t max_steps);
// Stages of a language model on two ranks, in 16 bits.
void check_stages_in_bf16(ranks::Cells& cells);

}  // namespace lockstep
