// The strategy, sizes and axes that follow from a DistributedConfig, and the check of one.
// Internal: programs have no use for these.
#pragma once

#include <string>
#include <vector>

#include <lockstep/distributed/axes/job_axes.h>
#include <lockstep/distributed/config.h>

namespace lockstep {

// The state that a config cuts along the axes of the data: none with DDP.
ShardingStrategy strategy_of(const DistributedConfig& config);

// With the sizes that the mode leaves to the number of ranks.
DistributedConfig sized_for(DistributedConfig config, int world_size);

// Whether that strategy takes over a model's parameters unit by unit, so that they need not all be
// there before.
bool takes_units(const DistributedConfig& config);

// The mesh that it asks for, as axes_for() says of JobSizes.
JobAxes axes_for(const DistributedConfig& config, const JobRanks& ranks);

// The settings that all ranks of a job must have alike to form its mesh and lay their tensors out,
// a line each. Other differences show in their calls, which are compared as they are made.
std::vector<std::string> lines_of(const DistributedConfig& config);

// UsageError where a config asks for what its strategy does not have.
void check(const DistributedConfig& config);

}  // namespace lockstep
