#include <lockstep/train/plan.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include <lockstep/base/error.h>
#include <lockstep/data/step_cut.h>
#include <lockstep/distributed/job_axes.h>
#include <lockstep/models/hugging_face_folder.h>
#include <lockstep/nn/sequence_positions.h>
#include <lockstep/parallel/pipeline/schedule/schedule_file.h>
#include <lockstep/train/run_length.h>

namespace lockstep::train {

namespace {

data::TokenFormat format_of(DataFormat format) {
  switch (format) {
    case DataFormat::automatic: return data::TokenFormat::automatic;
    case DataFormat::text: return data::TokenFormat::bytes;
    case DataFormat::nanogpt: return data::TokenFormat::nanogpt;
    case DataFormat::llm_c: return data::TokenFormat::llm_c;
    case DataFormat::megatron: return data::TokenFormat::megatron;
  }
  LOCKSTEP_CHECK(false, "format {}", static_cast<int>(format));
  return {};
}

std::shared_ptr<const data::TokenStream> open_stream(
    const std::vector<std::filesystem::path>& paths, const DataSection& section) {
  return std::make_shared<const data::TokenStream>(
      data::TokenStream::open(paths, format_of(section.format)));
}

// `data_vocabulary` is that of the data, where the config has none.
models::ModelConfig model_of(const ModelSection& section, std::int64_t data_vocabulary,
                             std::int64_t sequence_length) {
  if (!section.from.empty()) {
    auto config = models::read_model_config(section.from);
    config.dropout = section.dropout;
    return models::resolved(config);
  }
  return models::resolved(
      {.family = section.family == ModelFamily::gpt2 ? models::Family::gpt2 : models::Family::llama,
       .vocab_size = section.vocab_size > 0 ? section.vocab_size : data_vocabulary,
       .hidden_size = section.hidden_size,
       .num_layers = section.num_layers,
       .num_heads = section.num_heads,
       .num_kv_heads = section.num_kv_heads,
       .intermediate_size = section.intermediate_size,
       .max_positions = section.max_positions > 0 ? section.max_positions : sequence_length,
       .norm_eps = section.norm_eps,
       .rope_theta = section.rope_theta,
       .tie_embeddings = section.tie_embeddings,
       .dropout = section.dropout});
}

// Fills in the length of the run where a schedule needs it.
optim::ScheduleOptions with_length(optim::ScheduleOptions options, std::int64_t total_steps) {
  std::visit(
      [&](auto& schedule) {
        if constexpr (requires { schedule.total_num_steps; })
          if (schedule.total_num_steps == 0) schedule.total_num_steps = total_steps;
      },
      options);
  return options;
}

void check_vocabulary(const data::TokenStream& stream, const models::ModelConfig& model) {
  try {
    stream.check_vocabulary(model.vocab_size);
  } catch (const UsageError& error) {
    throw UsageError("model.vocab_size is {}: {}", model.vocab_size, error.what());
  }
}

void check_sharding(const ShardingSection& sharding, int world_size) {
  if (sharding.ranks_per_copy > 0 && world_size % sharding.ranks_per_copy != 0)
    throw UsageError(
        "fsdp.ranks_per_copy is {}, and {} ranks do not divide into groups of so many: "
        "make it a number that {} is a multiple of, or start other ranks",
        sharding.ranks_per_copy, world_size, world_size);
  // How many ranks of a host hold a copy is found out there.
  if (sharding.strategy == Sharding::hybrid && sharding.ranks_per_copy == 0) return;
  const std::int64_t per_copy =
      sharding.strategy == Sharding::hybrid ? sharding.ranks_per_copy : world_size;
  if (per_copy % sharding.zero_plus_plus.hpz_partition_size != 0)
    throw UsageError(
        "zero_optimization.zero_hpz_partition_size is {}, and the {} ranks that hold a "
        "copy of the model do not divide into nodes of so many: make it a number that "
        "{} is a multiple of, or start other ranks",
        sharding.zero_plus_plus.hpz_partition_size, per_copy, per_copy);
}

ModelParallelSizes sizes_of(const ParallelSection& parallel) {
  return {.tensor = static_cast<int>(parallel.tensor),
          .pipeline = static_cast<int>(parallel.pipeline),
          .context = static_cast<int>(parallel.context)};
}

// Lengths that ranks share are cut into equal parts.
void check_sequences(const ParallelSection& parallel, std::int64_t length,
                     const models::ModelConfig& model) {
  const std::int64_t context_parts =
      nn::length_multiple(static_cast<int>(parallel.context), nn::SplitKind::zigzag);
  const std::int64_t slices = parallel.sequence_parallel ? parallel.tensor : 1;
  const std::int64_t multiple =
      slices % 2 == 0 && context_parts > 1 ? context_parts * slices / 2 : context_parts * slices;
  if (length % context_parts != 0 || length / parallel.context % slices != 0) {
    const std::int64_t below = length / multiple * multiple;
    throw UsageError("data.sequence_length is {}, and ranks share each sequence ({}{}): make it a "
                     "multiple of {}, as {}{}",
                     length, to_text(sizes_of(parallel)), slices > 1 ? ", sequence_parallel" : "",
                     multiple, below > 0 ? fmt::format("{} or ", below) : "", below + multiple);
  }
  const std::int64_t heads = model.num_heads / parallel.tensor;
  if (parallel.context_algorithm == ContextExchange::all_to_all && heads % parallel.context != 0)
    throw UsageError(
        "parallel.context_algorithm is \"all_to_all\", which gives each of {} ranks as many heads, "
        "and of {} heads over {} tensor ranks each has {}: take \"ring\"",
        parallel.context, model.num_heads, parallel.tensor, heads);
}

// Whatever the number of ranks.
void check_parallel(const TrainConfig& config, const models::ModelConfig& model) {
  if (config.parallel.ranks_together() == 1) return;
  models::check_tensor_ranks(model, config.parallel.tensor);
  check_sequences(config.parallel, config.data.sequence_length, model);
  // With any number of micro-batches, which only a file says of its own.
  if (config.parallel.pipeline > 1 && config.parallel.schedule_file.empty())
    plan_pipeline(config, model, 1);
}

// What could be taken in place of a config's sizes.
ModelParallelSizes possible_sizes(const TrainConfig& config, const models::ModelConfig& model,
                                  int world_size) {
  return nearest_sizes(sizes_of(config.parallel), world_size, [&](const ModelParallelSizes& sizes) {
    TrainConfig other = config;
    other.parallel.tensor = sizes.tensor;
    other.parallel.pipeline = sizes.pipeline;
    other.parallel.context = sizes.context;
    try {
      check_parallel(other, model);
    } catch (const UsageError&) {
      return false;
    }
    return true;
  });
}

// How many ranks have samples of their own.
std::int64_t data_ranks(const TrainConfig& config, const models::ModelConfig& model,
                        int world_size) {
  const ParallelSection& parallel = config.parallel;
  const std::string sizes = to_text(sizes_of(parallel));
  const std::int64_t together = parallel.ranks_together();
  if (world_size % together != 0) {
    const std::int64_t below = world_size / together * together;
    throw UsageError("parallel has {}, which is {} ranks for each share of the data, and {} ranks "
                     "do not divide into groups of so many: start {}{}, or make it {}",
                     sizes, together, world_size, below > 0 ? fmt::format("{} or ", below) : "",
                     below + together, to_text(possible_sizes(config, model, world_size)));
  }
  if (parallel.data > 0 && parallel.data * together != world_size)
    throw UsageError("parallel has data {} × {}, which is {} ranks, and there {} {}: set data to "
                     "{}, or to -1 for all that the others leave, or start {} ranks",
                     parallel.data, sizes, parallel.data * together, world_size == 1 ? "is" : "are",
                     world_size, world_size / together, parallel.data * together);
  return world_size / together;
}

// A file's schedule has so many micro-batches, which a run that goes on with other ranks fills by
// larger or smaller ones.
std::int64_t num_micro_batches(const TrainConfig& config, std::int64_t num_data_ranks,
                               RunPlan& plan) {
  if (!plan.begun || config.parallel.schedule_file.empty() || config.batch.micro)
    return plan.batch.accumulation;
  const std::int64_t passes =
      pipeline::read_schedule(config.parallel.schedule_file).num_micro_batches;
  const std::int64_t of_all = num_data_ranks * passes;
  plan.batch = divide_batch(plan.batch.global, num_data_ranks,
                            plan.batch.global / of_all + (plan.batch.global % of_all != 0 ? 1 : 0));
  plan.most_micro = plan.batch.micro;
  return passes;
}

}  // namespace

BatchShares share_batch(const TrainConfig& config, const models::ModelConfig& model, int world_size,
                        const std::optional<BegunBatch>& begun) {
  const std::int64_t num_data_ranks = data_ranks(config, model, world_size);
  check_sharding(config.sharding, static_cast<int>(num_data_ranks));
  return {.num_data_ranks = num_data_ranks, .batch = resolve_batch(config, num_data_ranks, begun)};
}

RunPlan plan_run(const TrainConfig& config, int world_size,
                 const std::optional<BegunBatch>& begun) {
  const auto stream = open_stream(config.data.train, config.data);
  const models::ModelConfig model =
      model_of(config.model, stream->max_token() + 1, config.data.sequence_length);
  // What no number of ranks would mend comes before what one would.
  check_parallel(config, model);
  const auto [num_data_ranks, batch] = share_batch(config, model, world_size, begun);
  data::SequenceSet training(stream, config.data.sequence_length);
  std::optional<data::SequenceSet> validation;
  if (!config.data.validation.empty()) {
    validation.emplace(open_stream(config.data.validation, config.data),
                       config.data.sequence_length);
  } else if (config.data.validation_fraction > 0) {
    auto split = training.split(config.data.validation_fraction);
    training = split.train;
    validation = split.validation;
  }
  RunPlan plan{.model = model,
               .training = std::move(training),
               .validation = std::move(validation),
               .batch = batch,
               .begun = begun,
               .pipeline = {},
               .schedule = config.scheduler};
  plan.most_micro = plan.batch.micro;
  if (begun && !config.elasticity) plan.most_micro = std::max(plan.most_micro, begun->micro);
  if (config.data.sequence_length > plan.model.max_positions)
    throw UsageError("sequences of {} tokens do not fit a model of {} positions: make "
                     "data.sequence_length smaller{}",
                     config.data.sequence_length, plan.model.max_positions,
                     config.model.from.empty() ? " or model.max_positions larger"
                                               : ", as the model in model.from has no more");
  if (config.parallel.pipeline > 1)
    plan.pipeline =
        plan_pipeline(config, plan.model, num_micro_batches(config, num_data_ranks, plan));
  const data::StepCut cut{.samples_per_step = plan.batch.global,
                          .samples_per_batch = plan.batch.micro * num_data_ranks,
                          .drop_last = config.dataloader_drop_last};
  plan.steps_per_epoch = cut.num_steps(cut.num_used(plan.training.size()));
  if (plan.steps_per_epoch == 0)
    throw UsageError("the training data has {} sequences, which are not one batch of {}: make "
                     "train_batch_size smaller, or leave out dataloader_drop_last",
                     plan.training.size(), plan.batch.global);
  plan.total_steps = RunLength{.max_steps = config.max_steps, .epochs = config.epochs}.total_steps(
      plan.steps_per_epoch);
  if (config.parallel.timeline_step > plan.total_steps)
    throw UsageError("parallel.timeline_step is {}, and the run has {} steps: choose one of them",
                     config.parallel.timeline_step, plan.total_steps);
  plan.schedule = with_length(plan.schedule, plan.total_steps);
  optim::make_schedule(plan.schedule, config.optimizer.lr);
  check_vocabulary(*stream, plan.model);
  if (plan.validation) check_vocabulary(plan.validation->stream(), plan.model);
  return plan;
}

models::ModelConfig plan_model(const TrainConfig& config) {
  std::int64_t vocabulary = 0;
  if (config.model.from.empty() && config.model.vocab_size == 0) {
    try {
      vocabulary = open_stream(config.data.train, config.data)->max_token() + 1;
    } catch (const UsageError& error) {
      throw UsageError(
          "model.vocab_size is not set, and the data that tells it cannot be read: {}. "
          "Or set it",
          error.what());
    }
  }
  return model_of(config.model, vocabulary, config.data.sequence_length);
}

double unigram_entropy(const data::TokenStream& stream) {
  constexpr std::int64_t kMost = std::int64_t{1} << 24;
  constexpr std::int64_t kPiece = 1 << 16;
  std::unordered_map<std::int64_t, std::int64_t> counts;
  std::vector<std::int64_t> tokens;
  const std::int64_t total = std::min(stream.size(), kMost);
  for (std::int64_t first = 0; first < total; first += kPiece) {
    tokens.resize(static_cast<std::size_t>(std::min(kPiece, total - first)));
    stream.copy(first, tokens);
    for (const std::int64_t token : tokens) ++counts[token];
  }
  double entropy = 0;
  for (const auto& [token, count] : counts) {
    const double share = static_cast<double>(count) / static_cast<double>(total);
    entropy -= share * std::log(share);
  }
  return entropy;
}

}  // namespace lockstep::train
