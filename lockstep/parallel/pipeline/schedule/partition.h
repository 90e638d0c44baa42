// Which blocks of a model make up which stage.
#pragma once

#include <vector>

namespace lockstep::pipeline {

// Where a row of blocks is cut: stage s has the blocks from cuts[s] up to, and without, cuts[s +
// 1]. There is one number more than stages, from 0 to the number of blocks.
using Cuts = std::vector<int>;

// Cuts blocks into stages so that the most expensive stage costs as little as possible, and among
// such cuts stages differ least. A stage has at least one block. Costs are in any unit; an
// embedding and a head are blocks of their own, or are added to the costs of the first and the last
// block. UsageError for more stages than blocks, and for a cost that is negative or not a number.
Cuts partition(const std::vector<double>& costs, int num_stages);

// UsageError where `cuts` do not cut `num_blocks` blocks into `num_stages` stages, none of them
// empty.
void check_cuts(const Cuts& cuts, int num_blocks, int num_stages);

}  // namespace lockstep::pipeline
