#include <lockstep/train/preflight/run_plan.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include <lockstep/base/error.h>
#include <lockstep/data/sampling/distributed_sampler.h>
#include <lockstep/distributed/axes/job_axes.h>
#include <lockstep/mesh/placement/sequence_positions.h>
#include <lockstep/models/folders/hugging_face_folder.h>
#include <lockstep/parallel/pipeline/schedule/schedule_file.h>

namespace lockstep::train {

namespace {

std::shared_ptr<const data::TokenStream> open_stream(
    const std::vector<std::filesystem::path>& paths, const DataSection& section) {
  return std::make_shared<const data::TokenStream>(data::TokenStream::open(paths, section.format));
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
      {.family = section.family,
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

void check_vocabulary(const data::TokenStream& stream, std::int64_t size) {
  try {
    stream.check_vocabulary(size);
  } catch (const UsageError& error) {
    throw UsageError("model.vocab_size is {}: {}", size, error.what());
  }
}

void check_copies(const ShardingSection& sharding, std::int64_t num_data_ranks) {
  if (sharding.ranks_per_copy > 0 && num_data_ranks % sharding.ranks_per_copy != 0)
    throw UsageError(
        "fsdp.ranks_per_copy is {}, and {} ranks do not divide into groups of so many: "
        "make it a number that {} is a multiple of, or start other ranks",
        sharding.ranks_per_copy, num_data_ranks, num_data_ranks);
}

void check_nodes(const ShardingSection& sharding, std::int64_t num_data_ranks) {
  // How many ranks of a host hold a copy is found out there.
  if (has_copies(sharding.strategy) && sharding.ranks_per_copy == 0) return;
  const std::int64_t per_copy =
      has_copies(sharding.strategy) ? sharding.ranks_per_copy : num_data_ranks;
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
void check_lengths(const ParallelSection& parallel, std::int64_t length) {
  const std::int64_t context_parts =
      mesh::length_multiple(static_cast<int>(parallel.context), mesh::SplitKind::zigzag);
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
}

// After check_tensor_ranks().
void check_context_heads(const ParallelSection& parallel, const models::ModelConfig& model) {
  const std::int64_t heads = model.num_heads / parallel.tensor;
  if (parallel.context_algorithm == mesh::ContextAlgorithm::all_to_all &&
      heads % parallel.context != 0)
    throw UsageError(
        "parallel.context_algorithm is \"all_to_all\", which gives each of {} ranks as many heads, "
        "and of {} heads over {} tensor ranks each has {}: take \"ring\"",
        parallel.context, model.num_heads, parallel.tensor, heads);
}

// The checks that hold for any number of micro-batches; only a schedule file has its own number.
void check_pipeline(const TrainConfig& config, const models::ModelConfig& model) {
  if (config.parallel.pipeline > 1 && config.parallel.schedule_file.empty())
    resolve_pipeline(config, model, 1);
}

// Whatever the number of ranks.
void check_parallel(const TrainConfig& config, const models::ModelConfig& model) {
  if (config.parallel.ranks_together() == 1) return;
  models::check_tensor_ranks(model, config.parallel.tensor);
  check_context_heads(config.parallel, model);
  check_lengths(config.parallel, config.data.sequence_length);
  check_pipeline(config, model);
}

// The nearest sizes that would work in place of the config's.
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

// How many ranks have samples of their own. Where there is a model, a refusal says what it could
// be trained with.
std::int64_t data_ranks(const TrainConfig& config, const std::optional<models::ModelConfig>& model,
                        int world_size) {
  const ParallelSection& parallel = config.parallel;
  const std::string sizes = to_text(sizes_of(parallel));
  const std::int64_t together = parallel.ranks_together();
  if (world_size % together != 0) {
    const std::int64_t below = world_size / together * together;
    throw UsageError(
        "parallel has {}, which is {} ranks for each share of the data, and {} ranks "
        "do not divide into groups of so many: start {}{}{}",
        sizes, together, world_size, below > 0 ? fmt::format("{} or ", below) : "",
        below + together,
        model ? ", or make it " + to_text(possible_sizes(config, *model, world_size)) : "");
  }
  if (parallel.data > 0 && parallel.data * together != world_size)
    throw UsageError("parallel has data {} × {}, which is {} ranks, and there {} {}: set data to "
                     "{}, or to -1 for all that the others leave, or start {} ranks",
                     parallel.data, sizes, parallel.data * together, world_size == 1 ? "is" : "are",
                     world_size, world_size / together, parallel.data * together);
  return world_size / together;
}

// Where the data, which would tell it, cannot be read: large enough for any check.
constexpr std::int64_t kAnyVocabulary = 1 << 24;

constexpr std::string_view kModelKeys[] = {
    "model.from",         "model.family",    "model.vocab_size",   "model.hidden_size",
    "model.num_layers",   "model.num_heads", "model.num_kv_heads", "model.intermediate_size",
    "model.max_positions"};
constexpr std::string_view kBatchKeys[] = {"train_batch_size",
                                           "train_micro_batch_size_per_gpu",
                                           "gradient_accumulation_steps",
                                           "elasticity",
                                           "parallel.data",
                                           "parallel.tensor",
                                           "parallel.pipeline",
                                           "parallel.context",
                                           "output",
                                           "checkpoint.resume"};

// Resolves a run as far as a draft allows: what follows from a value that is wrong, or from a part
// that could not be made, is not there, and not judged.
class Resolver {
 public:
  Resolver(ConfigDraft& draft, int world_size, const std::optional<BegunBatch>& begun)
      : draft_(draft), config_(draft.config()), world_size_(world_size), begun_(begun) {}

  ResolvedRun resolve() {
    open_data();
    make_model();
    check_axes();
    share_samples();
    cut_sequences();
    make_pipeline();
    count_steps();
    check_vocabularies();
    draft_.finish();
    return {.model = *model_,
            .training = *std::move(training_),
            .validation = std::move(validation_),
            .batch = *batch_,
            .begun = begun_,
            .most_micro = most_micro_,
            .pipeline = std::move(pipeline_),
            .steps_per_epoch = steps_per_epoch_,
            .total_steps = total_steps_,
            .schedule = schedule_};
  }

 private:
  using Stream = std::shared_ptr<const data::TokenStream>;

  void open_data() {
    const DataSection& data = config_.data;
    draft_.check({"data.train", "data.format"},
                 [&] { train_stream_ = open_stream(data.train, data); });
    if (data.validation.empty()) return;
    draft_.check({"data.validation", "data.format"}, [&] {
      const Stream stream = open_stream(data.validation, data);
      if (train_stream_)
        data::check_same_tokens(train_stream_->files().front(), stream->files().front());
      validation_stream_ = stream;
    });
  }

  void make_model() {
    const std::int64_t vocabulary = train_stream_ ? train_stream_->max_token() + 1 : kAnyVocabulary;
    // A length that is wrong is 0, and no model's.
    const std::int64_t length = std::max<std::int64_t>(1, config_.data.sequence_length);
    draft_.check(kModelKeys, [&] { model_ = model_of(config_.model, vocabulary, length); });
    if (!model_) return;
    draft_.check({"data.sequence_length"}, [&] {
      if (config_.data.sequence_length > model_->max_positions)
        throw UsageError("sequences of {} tokens do not fit a model of {} positions: make "
                         "data.sequence_length smaller{}",
                         config_.data.sequence_length, model_->max_positions,
                         config_.model.from.empty() ? " or model.max_positions larger"
                                                    : ", as the model in model.from has no more");
    });
  }

  // Finds mistakes that no number of ranks would mend.
  void check_axes() {
    const ParallelSection& parallel = config_.parallel;
    if (parallel.ranks_together() == 1) return;
    const auto fits = [&](std::initializer_list<std::string_view> keys, auto check) {
      const bool passed = draft_.check(keys, check);
      axes_fit_ = axes_fit_ && passed;
      return passed;
    };
    fits({"data.sequence_length", "parallel.tensor", "parallel.context",
          "parallel.context_algorithm", "parallel.sequence_parallel"},
         [&] { check_lengths(parallel, config_.data.sequence_length); });
    if (!model_) return;
    if (fits({"parallel.tensor"}, [&] { models::check_tensor_ranks(*model_, parallel.tensor); }))
      fits({"parallel.context_algorithm", "parallel.context"},
           [&] { check_context_heads(parallel, *model_); });
    fits({"parallel.pipeline", "parallel.schedule", "parallel.chunks", "parallel.schedule_file",
          "parallel.balance", "parallel.stage_layers", "data.sequence_length"},
         [&] { check_pipeline(config_, *model_); });
  }

  void share_samples() {
    // Other axes would leave other ranks for the data.
    if (!axes_fit_) return;
    draft_.check({"parallel.data", "parallel.tensor", "parallel.pipeline", "parallel.context"},
                 [&] { num_data_ranks_ = data_ranks(config_, model_, world_size_); });
    if (!num_data_ranks_) return;
    draft_.check({"fsdp.ranks_per_copy", "sharding_strategy", "zero_optimization.stage"},
                 [&] { check_copies(config_.sharding, *num_data_ranks_); });
    draft_.check({"zero_optimization.zero_hpz_partition_size", "zero_optimization.stage",
                  "sharding_strategy", "fsdp.ranks_per_copy"},
                 [&] { check_nodes(config_.sharding, *num_data_ranks_); });
    draft_.check(kBatchKeys, [&] { batch_ = resolve_batch(config_, *num_data_ranks_, begun_); });
    if (!batch_) return;
    most_micro_ = batch_->micro;
    if (begun_ && !config_.elasticity) most_micro_ = std::max(most_micro_, begun_->micro);
  }

  void cut_sequences() {
    const DataSection& data = config_.data;
    if (train_stream_)
      draft_.check({"data.train", "data.sequence_length", "data.validation_fraction"}, [&] {
        data::SequenceSet all(train_stream_, data.sequence_length);
        if (data.validation.empty() && data.validation_fraction > 0) {
          auto split = all.split(data.validation_fraction);
          all = split.train;
          validation_ = split.validation;
        }
        training_ = std::move(all);
      });
    if (validation_stream_)
      draft_.check({"data.validation", "data.sequence_length"},
                   [&] { validation_.emplace(validation_stream_, data.sequence_length); });
  }

  // A file's schedule has so many micro-batches, which a run that goes on with other ranks fills by
  // larger or smaller ones.
  std::int64_t num_micro_batches() {
    if (!begun_ || config_.parallel.schedule_file.empty() || config_.batch.micro)
      return batch_->accumulation;
    const std::int64_t passes =
        pipeline::read_schedule(config_.parallel.schedule_file).num_micro_batches;
    const std::int64_t of_all = *num_data_ranks_ * passes;
    batch_ = divide_batch(batch_->global, *num_data_ranks_,
                          batch_->global / of_all + (batch_->global % of_all != 0 ? 1 : 0));
    most_micro_ = batch_->micro;
    return passes;
  }

  void make_pipeline() {
    if (!model_ || !batch_ || config_.parallel.pipeline == 1) return;
    draft_.check({"parallel.pipeline"},
                 [&] { pipeline_ = resolve_pipeline(config_, *model_, num_micro_batches()); });
  }

  void count_steps() {
    if (!training_ || !batch_) return;
    const data::StepCut cut{.samples_per_step = batch_->global,
                            .samples_per_batch = batch_->micro * *num_data_ranks_,
                            .drop_last = config_.dataloader_drop_last};
    if (!draft_.check({"train_batch_size", "dataloader_drop_last"}, [&] {
          steps_per_epoch_ = cut.num_steps(cut.num_used(training_->size()));
          if (steps_per_epoch_ == 0)
            throw UsageError("the training data has {} sequences, which are not one batch of {}: "
                             "make train_batch_size smaller, or leave out dataloader_drop_last",
                             training_->size(), batch_->global);
        }))
      return;
    const auto count = [&] {
      total_steps_ =
          RunLength{.max_steps = config_.max_steps, .epochs = config_.epochs}.total_steps(
              steps_per_epoch_);
    };
    if (!draft_.check({"max_steps", "epochs"}, count)) return;
    draft_.check({"parallel.timeline_step"}, [&] {
      if (config_.parallel.timeline_step > total_steps_)
        throw UsageError(
            "parallel.timeline_step is {}, and the run has {} steps: choose one of them",
            config_.parallel.timeline_step, total_steps_);
    });
    draft_.check({"scheduler", "optimizer.params.lr"}, [&] {
      schedule_ = config_.scheduler;
      schedule_.set_length(total_steps_);
      optim::make_schedule(schedule_, config_.optimizer.lr);
    });
  }

  void check_vocabularies() {
    // A size that stands in the config is judged whatever else is wrong with the model.
    const std::int64_t size = model_ ? model_->vocab_size : config_.model.vocab_size;
    if (size == 0) return;
    if (train_stream_)
      draft_.check({"model.vocab_size", "data.train"},
                   [&] { check_vocabulary(*train_stream_, size); });
    if (validation_stream_)
      draft_.check({"model.vocab_size", "data.validation"},
                   [&] { check_vocabulary(*validation_stream_, size); });
  }

  ConfigDraft& draft_;
  const TrainConfig& config_;
  int world_size_;
  std::optional<BegunBatch> begun_;
  Stream train_stream_;
  Stream validation_stream_;
  std::optional<models::ModelConfig> model_;
  bool axes_fit_ = true;
  std::optional<std::int64_t> num_data_ranks_;
  std::optional<Batch> batch_;
  std::int64_t most_micro_ = 0;
  std::optional<data::SequenceSet> training_;
  std::optional<data::SequenceSet> validation_;
  std::optional<RunPipeline> pipeline_;
  std::int64_t steps_per_epoch_ = 0;
  std::int64_t total_steps_ = 0;
  optim::ScheduleOptions schedule_;
};

}  // namespace

void check_is_built_in(const TrainConfig& config) {
  if (config.model_of == ModelOf::library)
    throw UsageError("the model is that of the library '{}', which lockstep train trains; this "
                     "looks into built-in models alone",
                     config.model.library.string());
}

Batch resolve_own_run(ConfigDraft& draft, int world_size, const std::optional<BegunBatch>& begun) {
  Batch batch;
  const TrainConfig& config = draft.config();
  draft.check({"parallel.data", "parallel.tensor", "train_batch_size",
               "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "elasticity",
               "fsdp.ranks_per_copy", "zero_optimization.zero_hpz_partition_size"},
              [&] {
                const std::int64_t num_data_ranks = data_ranks(config, std::nullopt, world_size);
                check_copies(config.sharding, num_data_ranks);
                check_nodes(config.sharding, num_data_ranks);
                batch = resolve_batch(config, num_data_ranks, begun);
              });
  draft.finish();
  return batch;
}

BatchShares share_batch(const TrainConfig& config, const models::ModelConfig& model, int world_size,
                        const std::optional<BegunBatch>& begun) {
  const std::int64_t num_data_ranks = data_ranks(config, model, world_size);
  check_copies(config.sharding, num_data_ranks);
  check_nodes(config.sharding, num_data_ranks);
  return {.num_data_ranks = num_data_ranks, .batch = resolve_batch(config, num_data_ranks, begun)};
}

ResolvedRun resolve_run(ConfigDraft& draft, int world_size,
                        const std::optional<BegunBatch>& begun) {
  check_is_built_in(draft.config());
  return Resolver(draft, world_size, begun).resolve();
}

ResolvedRun resolve_run(const TrainConfig& config, int world_size,
                        const std::optional<BegunBatch>& begun) {
  ConfigDraft draft(config);
  return resolve_run(draft, world_size, begun);
}

models::ModelConfig resolve_model(const TrainConfig& config) {
  check_is_built_in(config);
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
