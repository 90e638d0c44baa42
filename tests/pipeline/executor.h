// Pipelines of real ranks: one rank's part of the tables.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::pipeline {

// Loss, gradients, live micro-batches and timelines of every kind of schedule.
void check_schedules(ranks::Cells& cells);
// The measured times of ranks on one host are in the order in which ranks waited for each other;
// timelines of several hosts say that they are not aligned.
void check_clocks_of_one_host(ranks::Cells& cells);
void check_clocks_of_several_hosts(ranks::Cells& cells);
// Tied parameters, evaluation, and other kinds of steps.
void check_steps(ranks::Cells& cells);
// Stages that throw, and results that stages must not return.
void check_failures(ranks::Cells& cells);
// Arguments from which no pipeline can be made.
void check_mistakes(ranks::Cells& cells);
// Halves of backward passes through layers that ranks share.
void check_cut_layers(ranks::Cells& cells);
// A Sequential that is cut over the ranks.
void check_pipes(ranks::Cells& cells);
// A model that lists its blocks, cut over the ranks.
void check_listed(ranks::Cells& cells);
// The programs of docs/pipeline.md.
void check_documented(ranks::Cells& cells);

}  // namespace lockstep::pipeline
