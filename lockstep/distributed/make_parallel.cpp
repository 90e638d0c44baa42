#include <lockstep/distributed/make_parallel.h>

#include <lockstep/base/error.h>
#include <lockstep/distributed/config_rules.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/parallel/shard/fully_sharded_data_parallel.h>
#include <lockstep/parallel/shard/optimizer_shards.h>

namespace lockstep {

namespace {

using replicate::DistributedDataParallel;
using shard::FullyShardedDataParallel;

std::unique_ptr<data_parallel::ParallelModel> make_strategy(
    torch::nn::Module& module, mesh::DeviceMesh& mesh, const JobAxes& axes,
    const DistributedConfig& config, const data_parallel::ModelContext& context,
    const shard::Origin& origin) {
  const ShardingStrategy strategy = strategy_of(config);
  const auto all = group_along(mesh, axes.gradients);
  shard::Options options = config.fsdp;
  options.cut =
      cuts_parameters(strategy) ? shard::Cut::gradients_and_parameters : shard::Cut::gradients;
  switch (strategy) {
    case ShardingStrategy::NO_SHARD:
      return std::make_unique<DistributedDataParallel>(module, all, config.ddp, context);
    case ShardingStrategy::SHARD_OPTIMIZER:
      return std::make_unique<DistributedDataParallel>(
          module, all, config.ddp, context,
          std::make_unique<shard::OptimizerShards>(module, all, config.fsdp.units));
    case ShardingStrategy::SHARD_GRAD_OP:
    case ShardingStrategy::FULL_SHARD:
      return std::make_unique<FullyShardedDataParallel>(module, shard::shard_over(all), options,
                                                        context, origin);
    case ShardingStrategy::HYBRID_SHARD:
      return std::make_unique<FullyShardedDataParallel>(
          module, shard::shard_over(all, group_along(mesh, axes.shards), mesh.axis("dp_replicate")),
          options, context, origin);
  }
  LOCKSTEP_CHECK(false, "a strategy without a name");
}

}  // namespace

std::shared_ptr<comm::Communicator> group_along(mesh::DeviceMesh& mesh,
                                                const std::vector<std::string>& axes) {
  if (axes.empty()) return nullptr;
  return axes.size() == 1 ? mesh.axis(axes.front()) : mesh.flatten(axes);
}

std::unique_ptr<data_parallel::ParallelModel> make_parallel(
    torch::nn::Module& module, mesh::DeviceMesh& mesh, const JobAxes& axes,
    const DistributedConfig& config, const data_parallel::ModelContext& context,
    const shard::Origin& origin) {
  auto made = make_strategy(module, mesh, axes, config, context, origin);
  made->check_consistency_every(config.consistency_check_interval);
  made->exchange_each_pass(exchanges_each_pass(config.exchange_gradients, strategy_of(config)));
  return made;
}

}  // namespace lockstep
