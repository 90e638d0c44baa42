#include <lockstep/train/preflight/run_layout.h>

#include <algorithm>

#include <lockstep/base/error.h>
#include <lockstep/mesh/placement/sequence_positions.h>
#include <lockstep/train/preflight/memory_fit.h>

namespace lockstep::train {

namespace {

// Bytes that a rank sends along the tensor axis for the layers of a step. Each layer sums two
// activations in forward and two gradients in backward, and with sequence parallelism gathers two
// more in backward. A sum is a scatter and a gather.
std::int64_t bytes_along_tensor_axis(const TrainConfig& config, const ResolvedRun& run,
                                     std::int64_t most_layers) {
  const std::int64_t ranks = config.parallel.tensor;
  // CPUs compute in fp32 whatever the config says.
  const bool in_16_bits =
      config.precision.compute != Precision::fp32 && config.device != DeviceChoice::cpu;
  const std::int64_t element = in_16_bits ? 2 : 4;
  const std::int64_t activation = run.batch.micro * config.data.sequence_length /
                                  config.parallel.context * run.model.hidden_size * element;
  const std::int64_t moves = config.parallel.sequence_parallel ? 10 : 8;
  return moves * most_layers * run.batch.accumulation * activation * (ranks - 1) / ranks;
}

// Along an axis that is there only where it has more than one rank.
int coordinate_of(const mesh::MeshShape& shape, int rank, const std::string& axis) {
  const bool there =
      std::ranges::any_of(shape.axes(), [&](const mesh::Axis& one) { return one.name == axis; });
  return there ? shape.coordinate(rank, axis) : 0;
}

void place_on_pipeline(const ResolvedRun& run, int pipeline_rank, RankLayout& layout) {
  if (!run.pipeline) {
    layout.stages = {0};
    layout.layers = {{0, run.model.num_layers}};
    return;
  }
  const auto& rank_of_stage = run.pipeline->schedule.rank_of_stage;
  for (std::size_t stage = 0; stage < rank_of_stage.size(); ++stage)
    if (rank_of_stage[stage] == pipeline_rank) {
      layout.stages.push_back(static_cast<int>(stage));
      layout.layers.push_back(run.pipeline->layers[stage]);
    }
}

void place_on_tensor_axis(const models::ModelConfig& model, int rank, int ranks,
                          RankLayout& layout) {
  layout.heads = mesh::part_of(model.num_heads, rank, ranks);
  const std::int64_t kv_parts = std::min<std::int64_t>(ranks, model.num_kv_heads);
  layout.kv_heads = mesh::part_of(model.num_kv_heads, static_cast<int>(rank * kv_parts / ranks),
                                  static_cast<int>(kv_parts));
  layout.inside = mesh::part_of(model.intermediate_size, rank, ranks);
  layout.vocabulary = mesh::part_of(model.vocab_size, rank, ranks);
}

std::int64_t num_parameters_of(const RankLayout& layout, const models::ModelConfig& model,
                               int tensor_rank, int tensor_ranks) {
  models::ModelShare share{.tensor_rank = tensor_rank, .tensor_ranks = tensor_ranks};
  for (const mesh::Interval& layers : layout.layers) {
    share.num_layers += layers.size();
    share.has_embedding |= layers.begin == 0;
    share.has_head |= layers.end == model.num_layers;
  }
  return models::num_parameters(model, share);
}

// The axes whose ranks share what the strategy cuts.
std::vector<std::string> axes_of_shards(const JobAxes& axes, ShardingStrategy strategy) {
  if (!cuts_optimizer(strategy)) return {};
  return cuts_gradients(strategy) ? axes.shards : axes.gradients;
}

}  // namespace

JobSizes job_sizes(const TrainConfig& config) {
  JobSizes sizes{.strategy = config.sharding.strategy,
                 .data = {},
                 .model_parallel = {.tensor = static_cast<int>(config.parallel.tensor),
                                    .pipeline = static_cast<int>(config.parallel.pipeline),
                                    .context = static_cast<int>(config.parallel.context)}};
  if (config.sharding.ranks_per_copy > 0)
    sizes.data = {{"dp_replicate", -1},
                  {"dp_shard", static_cast<int>(config.sharding.ranks_per_copy)}};
  return sizes;
}

RunLayout layout_of(const TrainConfig& config, const ResolvedRun& run, int num_ranks,
                    int ranks_per_host) {
  if (ranks_per_host < 1 || num_ranks % ranks_per_host != 0)
    throw UsageError("{} ranks are not a number of hosts with {} each", num_ranks, ranks_per_host);
  const JobSizes sizes = job_sizes(config);
  JobAxes axes = axes_for(sizes, {.world = num_ranks, .of_host = ranks_per_host});
  RunLayout layout{.shape = mesh::MeshShape(axes.axes, num_ranks),
                   .axes = axes,
                   .strategy = sizes.strategy,
                   .ranks = {},
                   .tensor_crossing = {}};
  const mesh::MeshShape& shape = layout.shape;
  const std::vector<std::string> shards = axes_of_shards(axes, sizes.strategy);
  if (!shards.empty()) layout.shards = shape.group_size(shards);
  layout.data_ranks = shape.group_size(axes.samples);
  const int tensor_ranks = sizes.model_parallel.tensor;
  std::vector<int> hosts;
  std::int64_t most_layers = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    RankLayout& one = layout.ranks.emplace_back();
    one.host = rank / ranks_per_host;
    hosts.push_back(one.host);
    one.coordinates = shape.coordinates(rank);
    const int tensor_rank = coordinate_of(shape, rank, "tp");
    place_on_pipeline(run, coordinate_of(shape, rank, "pp"), one);
    place_on_tensor_axis(run.model, tensor_rank, tensor_ranks, one);
    one.positions = mesh::positions(
        config.data.sequence_length,
        {.rank = coordinate_of(shape, rank, "cp"), .size = sizes.model_parallel.context});
    one.data_rank = shape.position_in_group(rank, axes.samples);
    if (!shards.empty()) one.shard_rank = shape.position_in_group(rank, shards);
    one.num_parameters = num_parameters_of(one, run.model, tensor_rank, tensor_ranks);
    std::int64_t num_layers = 0;
    for (const mesh::Interval& layers : one.layers) num_layers += layers.size();
    most_layers = std::max(most_layers, num_layers);
  }
  if (tensor_ranks > 1) {
    layout.tensor_crossing = host_crossing(shape, "tp", hosts);
    layout.tensor_bytes = bytes_along_tensor_axis(config, run, most_layers);
  }
  return layout;
}

}  // namespace lockstep::train
