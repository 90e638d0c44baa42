// The strategy that a config asks for, made for a module.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/distributed/axes/job_axes.h>
#include <lockstep/distributed/config.h>
#include <lockstep/mesh/device_mesh.h>
#include <lockstep/parallel/data_parallel/parallel_model.h>
#include <lockstep/parallel/shard/flat_unit.h>

namespace lockstep {

// The ranks along one or several axes; null along none.
std::shared_ptr<comm::Communicator> group_along(mesh::DeviceMesh& mesh,
                                                const std::vector<std::string>& axes);

// Spreads a module over the ranks of a mesh along those axes that data is spread over.
std::unique_ptr<data_parallel::ParallelModel> make_parallel(
    torch::nn::Module& module, mesh::DeviceMesh& mesh, const JobAxes& axes,
    const DistributedConfig& config, const data_parallel::ModelContext& context = {},
    const shard::Origin& origin = {});

}  // namespace lockstep
