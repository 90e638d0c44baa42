// The engine against a loop of one process that is written by hand.
#pragma once

#include <filesystem>

#include <tests/ranks/cells.h>

namespace lockstep {

// Every model under every strategy.
void check_engine_parity(ranks::Cells& cells);

// Every model that lists its blocks, in pipelines.
void check_engine_pipelines(ranks::Cells& cells);

// Passes without samples, and what is wrong on one rank or on all of two.
void check_engine_mistakes(ranks::Cells& cells);

// Trains a part of a run, and saves it in `folder`; and goes on with it, on whatever number of
// ranks.
void save_half_a_run(ranks::Cells& cells, const std::filesystem::path& folder);
void finish_half_a_run(ranks::Cells& cells, const std::filesystem::path& folder);

}  // namespace lockstep
