// Which blocks of a model make up which stage.
#pragma once

#include <vector>

namespace lockstep::pipeline {

// Where a row of blocks is cut: stage s has those from [s] up to, and without, [s + 1]. One more
// than there are stages, from 0 to the number of blocks.
using Cuts = std::vector<int>;

// So that the dearest stage costs as little as it can, and among such cuts stages differ least. A
// stage has at least one block. Costs are in any unit; an embedding and a head are blocks of their
// own, or are added to the first and the last one's. UsageError for more stages than blocks, and
// for a cost that is below zero or no number.
Cuts partition(const std::vector<double>& costs, int num_stages);

// UsageError where `cuts` are not what is said above, or leave a stage without a block.
void check_cuts(const Cuts& cuts, int num_blocks, int num_stages);

}  // namespace lockstep::pipeline
