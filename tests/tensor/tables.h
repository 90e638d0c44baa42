// The properties that the ranks of a job check.
#pragma once

#include <tests/ranks/cells.h>

namespace lockstep::nn {

void check_column_layers(ranks::Cells& cells);
void check_row_layers(ranks::Cells& cells);
void check_vocabulary_layers(ranks::Cells& cells);
void check_vocabulary_loss(ranks::Cells& cells);
void check_slices_of_positions(ranks::Cells& cells);
void check_modules_of_users(ranks::Cells& cells);
void check_deferred_models(ranks::Cells& cells);
void check_traffic(ranks::Cells& cells);
void check_tensor_mistakes(ranks::Cells& cells);
void check_ranks_that_disagree(ranks::Cells& cells);

}  // namespace lockstep::nn

namespace lockstep::tensor {

// Plain modules that a plan of names cuts.
void check_plain_modules(ranks::Cells& cells);
void check_plain_attention(ranks::Cells& cells);
void check_plain_losses(ranks::Cells& cells);
void check_plain_plans(ranks::Cells& cells);
void check_plain_gathers(ranks::Cells& cells);
void check_plain_operators(ranks::Cells& cells);
void check_plain_graph(ranks::Cells& cells);
void check_plain_training(ranks::Cells& cells);
void check_plain_state(ranks::Cells& cells);
void check_plain_mistakes(ranks::Cells& cells);

}  // namespace lockstep::tensor
