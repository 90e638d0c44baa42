// Pipelines of real ranks: one rank's share of the tables.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::pipeline {

// Loss, gradients, live micro-batches and timelines of every kind of schedule.
void check_schedules(ranks::Cells& cells);
// That measured ranks of one host stand in the order of what they waited for, and that those of
// several say that they do not.
void check_clocks_of_one_host(ranks::Cells& cells);
void check_clocks_of_several_hosts(ranks::Cells& cells);
// Tied parameters, evaluation, and the like.
void check_steps(ranks::Cells& cells);
// Stages that throw, and what they must not return.
void check_failures(ranks::Cells& cells);
// What a pipeline is not to be made of.
void check_mistakes(ranks::Cells& cells);
// Halves of backward passes through layers that ranks share.
void check_cut_layers(ranks::Cells& cells);
// A Sequential over the ranks.
void check_pipes(ranks::Cells& cells);
// A model that lists its blocks, likewise.
void check_listed(ranks::Cells& cells);
// The programs of docs/pipeline.md.
void check_documented(ranks::Cells& cells);

}  // namespace lockstep::pipeline
