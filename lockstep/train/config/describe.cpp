// Every key of a config: a new one is a line here, and its use.
#include <limits>
#include <map>

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/comm/backends/table.h>
#include <lockstep/data/tokens/token_format.h>
#include <lockstep/models/spec/family.h>
#include <lockstep/optim/registry/registry.h>
#include <lockstep/train/config/keys.h>
#include <lockstep/train/config/names.h>
#include <lockstep/train/config/sections.h>

namespace lockstep::train {

namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();
constexpr double kHighestRate = 1000;
constexpr std::int64_t kMostInt32 = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kLargestVocabulary = 1 << 24;
constexpr std::int64_t kLargestWidth = 1 << 20;
constexpr std::int64_t kMostLayers = 1 << 16;
constexpr std::int64_t kMostRanks = 1 << 24;
constexpr std::int64_t kMostOnAnAxis = 1 << 20;
constexpr double kMostMegabytes = 1 << 20;
constexpr std::string_view kNoDisks =
    "but nothing is offloaded to disks here: take \"cpu\", the host's memory, or \"none\"";
constexpr JsonSection::Range kRatio = {.lowest = 0, .highest = 1};

// "`"gpt2"` (learned positions, …), `"llama"` (…)".
std::string about_families() {
  std::string text;
  for (const std::string& name : models::family_names())
    text += fmt::format("{}`\"{}\"` ({})", text.empty() ? "" : ", ", name,
                        models::family_named(name).about);
  return text;
}

void describe_model(Keys& keys, const DataSection& data, ModelSection& model) {
  keys.chapter("Model");
  if (keys.writes(!model.from.empty()))
    keys.path({.name = "from",
               .meaning = "a checkpoint, or a Hugging Face folder with `config.json` and "
                          "`model.safetensors` (also sharded)"},
              model.from);
  // Where there is one, its folder says the rest.
  if (!keys.has(model.from.empty())) return;
  // Nobody may go on with another family than the one that is named.
  (void)models::family_named(model.family);
  const std::string families = about_families();
  keys.word({.name = "family", .meaning = families}, model.family, models::family_names());
  const models::Family& family = models::family_named(model.family);
  keys.integer({.name = "vocab_size",
                .meaning = "number of different tokens: see [Data](#data)",
                .by_default = "what the data's type can hold",
                .zero_is_auto = true},
               model.vocab_size, {1, kLargestVocabulary});
  keys.integer({.name = "hidden_size",
                .meaning = "width; a multiple of `num_heads`",
                .needed = "the width of the model, for example 384"},
               model.hidden_size, {1, kLargestWidth});
  keys.integer({.name = "num_layers",
                .meaning = "transformer blocks",
                .needed = "the number of transformer blocks, for example 6"},
               model.num_layers, {1, kMostLayers});
  keys.integer({.name = "num_heads",
                .meaning = "attention heads",
                .needed = "the number of attention heads, for example 6"},
               model.num_heads, {1, kLargestWidth});
  keys.then([&] {
    model.num_kv_heads = model.num_heads;
    model.intermediate_size = family.intermediate_size(model.hidden_size);
    model.max_positions = data.sequence_length;
    model.tie_embeddings = family.tied;
  });
  keys.integer({.name = "num_kv_heads",
                .meaning = "heads of keys and values, which divide `num_heads`: grouped queries",
                .by_default = "`num_heads`"},
               model.num_kv_heads, {1, kLargestWidth});
  keys.integer({.name = "intermediate_size",
                .meaning = "width inside the MLP",
                .by_default = "the family's"},
               model.intermediate_size, {1, 8 * kLargestWidth});
  keys.integer({.name = "max_positions",
                .meaning = "longest sequence; at least `data.sequence_length`",
                .by_default = "`data.sequence_length`"},
               model.max_positions, {1, kMostTokens});
  keys.number({.name = "dropout", .meaning = "at least 0, below 1"}, model.dropout,
              {.lowest = 0, .highest = 1, .below_highest = true});
  keys.boolean({.name = "tie_embeddings",
                .meaning = "whether the output layer shares the embedding's weights",
                .by_default = "the family's: true for `\"gpt2\"`"},
               model.tie_embeddings);
  keys.number({.name = "norm_eps", .meaning = "added to the variance in norms"}, model.norm_eps,
              {.lowest = 0, .highest = 1, .above_lowest = true});
  if (keys.writes(family.rotary))
    keys.number({.name = "rope_theta", .meaning = "base of rotary positions"}, model.rope_theta,
                {.lowest = 1, .highest = 1e12});
}

void describe_token_files(Keys& keys, DataSection& data) {
  keys.paths({.name = "train",
              .meaning = "a file, or a list of files",
              .needed = "the text or token file to train on, or a list of them"},
             data.train);
  bool validates = !data.validation.empty();
  if (keys.writes(validates))
    validates = keys.paths({.name = "validation",
                            .meaning = "the same, to measure the validation loss on",
                            .by_default = "none"},
                           data.validation);
  keys.then([&] {
    if (validates) data.validation_fraction = 0;
  });
  keys.number({.name = "validation_fraction",
               .meaning = "the part of `data.train` that is kept for validation; 0: none",
               .by_default = "0.1, or 0 with `data.validation`"},
              data.validation_fraction, {.lowest = 0, .highest = 1, .below_highest = true});
  // A program that sets a format of no such name is told so.
  if (data.format != data::kAutomaticFormat) (void)data::token_format(data.format);
  std::vector<std::string> names{std::string(data::kAutomaticFormat)};
  std::vector<std::string> formats;
  for (const data::TokenFormat* format : data::token_formats()) {
    names.push_back(format->name);
    formats.push_back(fmt::format("`\"{}\"`{}", format->name,
                                  format->note.empty() ? "" : " (" + format->note + ")"));
  }
  const std::string meaning =
      fmt::format("{}; `\"auto\"` looks at the files", fmt::join(formats, ", "));
  keys.word({.name = "format", .meaning = meaning}, data.format, names);
  keys.integer({.name = "sequence_length",
                .meaning = "tokens of one sample",
                .needed = "the number of tokens of one sample, for example 256"},
               data.sequence_length, {1, kMostTokens});
}

void describe_data(Keys& keys, const TrainConfig& config, DataSection& data) {
  keys.chapter("Data");
  if (keys.has(config.model_of == ModelOf::config)) describe_token_files(keys, data);
  keys.integer(
      {.name = "num_workers", .meaning = "threads that make batches; 0: the thread that trains"},
      data.num_workers, {0, 256});
  keys.integer({.name = "prefetch", .meaning = "batches that wait ready, for each worker"},
               data.prefetch, {1, 1024});
}

void describe_elasticity(Keys& keys, std::optional<ElasticitySection>& elasticity) {
  ElasticitySection given = elasticity.value_or(ElasticitySection{});
  bool enabled = elasticity.has_value();
  keys.boolean({.name = "enabled",
                .meaning = "the batch is chosen, in place of the three above: of those up to "
                           "`max_train_batch_size` the one that most numbers of ranks divide "
                           "evenly, as DeepSpeed chooses it",
                .deepspeed = "same"},
               enabled);
  // The section is off: its values do not matter.
  if (!enabled) keys.ignore_values();
  if (!keys.writes(enabled)) return;
  keys.integer({.name = "max_train_batch_size",
                .meaning = "samples of one step, at most",
                .deepspeed = "same",
                .needed = "the most samples that a step may have"},
               given.max_global, {1, kMostSamples});
  keys.integers(
      {.name = "micro_batch_sizes",
       .meaning =
           "samples of a forward pass: the largest of these that divides a rank's share evenly",
       .deepspeed = "same",
       .needed = "how many samples a forward pass may have, for example [2, 4]"},
      given.micro_batches, {1, kMostSamples});
  keys.integer({.name = "min_gpus",
                .meaning = "fewest ranks with which the run may train; others are an error",
                .deepspeed = "same"},
               given.min_ranks, {1, kMostOnAnAxis});
  keys.integer(
      {.name = "max_gpus",
       .meaning =
           "most ranks with which the run may train. Those between the two that do not divide the "
           "batch evenly, which DeepSpeed refuses, have shares that differ by one sample",
       .deepspeed = "same"},
      given.max_ranks, {1, kMostOnAnAxis});
  keys.boolean(
      {.name = "prefer_larger_batch",
       .meaning =
           "of batches that equally many numbers of ranks divide, the larger (true) or the smaller",
       .deepspeed = "same"},
      given.prefer_larger);
  keys.then([&] {
    if (enabled) elasticity = given;
  });
}

void describe_batch(Keys& keys, TrainConfig& config) {
  keys.chapter("Batch");
  keys.integer({.name = "train_batch_size",
                .meaning = "samples of one step, on all ranks",
                .deepspeed = "same"},
               config.batch.global, {1, kMostSamples});
  keys.integer({.name = "train_micro_batch_size_per_gpu",
                .meaning = "samples of one forward pass on one rank, whatever its device",
                .deepspeed = "same"},
               config.batch.micro, {1, kMostSamples});
  keys.integer({.name = "gradient_accumulation_steps",
                .meaning = "forward passes of one step",
                .deepspeed = "same"},
               config.batch.accumulation, {1, kMostSamples});
  keys.section({.name = "elasticity"},
               [&](Keys& inside) { describe_elasticity(inside, config.elasticity); });
}

// Keys of an optimizer or a schedule, as it describes them itself.
class OptionsAsKeys final : public optim::OptionKeys {
 public:
  explicit OptionsAsKeys(Keys& keys) : keys_(keys) {}

  void number(const optim::OptionKey& key, double& value,
              const optim::NumberRange& range) override {
    keys_.number(of(key), value, of(range));
  }
  void number(const optim::OptionKey& key, std::optional<double>& value,
              const optim::NumberRange& range) override {
    keys_.number(of(key), value, of(range));
  }
  void two_numbers(const optim::OptionKey& key, std::array<double, 2>& values,
                   const optim::NumberRange& range) override {
    keys_.two_numbers(of(key), values, of(range));
  }
  void integer(const optim::OptionKey& key, std::int64_t& value,
               const optim::CountRange& range) override {
    keys_.integer(of(key), value, {range.lowest, range.highest});
  }
  void integer(const optim::OptionKey& key, std::optional<std::int64_t>& value,
               const optim::CountRange& range) override {
    keys_.integer(of(key), value, {range.lowest, range.highest});
  }
  void boolean(const optim::OptionKey& key, bool& value) override {
    if (key.written || keys_.writes(false)) keys_.boolean(of(key), value);
  }
  void choice(const optim::OptionKey& key, std::size_t& chosen,
              const std::vector<std::string_view>& names) override {
    keys_.choice(of(key), chosen, names);
  }
  void then(const std::function<void()>& fill) override { keys_.then(fill); }

 private:
  static Key of(const optim::OptionKey& key) {
    return {.name = key.name,
            .meaning = key.meaning,
            .deepspeed = key.deepspeed,
            .by_default = key.by_default,
            .needed = key.needed,
            .zero_is_auto = key.zero_is_auto};
  }
  static JsonSection::Range of(const optim::NumberRange& range) {
    return {.lowest = range.lowest,
            .highest = range.highest,
            .above_lowest = range.above_lowest,
            .below_highest = range.below_highest};
  }

  Keys& keys_;
};

// "`"AdamW"` (also `"FusedAdam"`), `"SGD"`".
std::string names_text(const std::vector<optim::OptimizerType>& types) {
  std::string text;
  for (const optim::OptimizerType& type : types) {
    text += fmt::format("{}`\"{}\"`", text.empty() ? "" : ", ", type.names.front());
    for (std::size_t i = 1; i < type.names.size(); ++i)
      text += fmt::format("{}`\"{}\"`", i == 1 ? " (also " : ", ", type.names[i]);
    if (type.names.size() > 1) text += ")";
  }
  return text;
}

// Names that stand for the same options share a chapter. Where the type is `unknown`, keys of every
// type are read.
void describe_options(Keys& params, const std::vector<optim::OptimizerType>& types,
                      std::size_t first, bool unknown, OptimizerSection& optimizer) {
  bool chosen = false;
  std::string title;
  for (const optim::OptimizerType& type : types) {
    if (type.options.type() != types[first].options.type()) continue;
    chosen = chosen || type.names.front() == optimizer.type;
    title += fmt::format("{}{}", title.empty() ? "" : ", ", type.names.front());
  }
  if (!params.has(chosen || unknown)) return;
  params.chapter(title);
  OptionsAsKeys keys(params);
  optim::OptimizerOptions other = types[first].options;
  (chosen ? optimizer.options : other).describe(keys);
}

void describe_optimizer(Keys& keys, OptimizerSection& optimizer) {
  const std::vector<optim::OptimizerType> types = optim::optimizer_types();
  std::vector<std::string_view> names;
  std::vector<std::size_t> type_of;  // of each name
  std::size_t chosen = 0;
  for (std::size_t i = 0; i < types.size(); ++i) {
    if (types[i].names.front() == optimizer.type) chosen = i;
    names.emplace_back(types[i].names.front());
    type_of.push_back(i);
  }
  for (std::size_t i = 0; i < types.size(); ++i)
    for (std::size_t other = 1; other < types[i].names.size(); ++other) {
      names.emplace_back(types[i].names[other]);
      type_of.push_back(i);
    }
  const std::string meaning = names_text(types) + ", or one that the program registers itself";
  keys.choice({.name = "type", .meaning = meaning, .deepspeed = "same"}, chosen, names);
  keys.then([&] {
    const optim::OptimizerType& type = types[type_of[chosen]];
    optimizer.type = type.names.front();
    optimizer.options = type.options;
  });
  const bool unknown = keys.is_wrong("type");
  keys.section({.name = "params"}, [&](Keys& params) {
    params.call(optimizer.type);
    params.number({.name = "lr",
                   .meaning = "learning rate",
                   .deepspeed = "same",
                   .needed = "the learning rate, for example 3e-4"},
                  optimizer.lr, {.lowest = 0, .highest = kHighestRate, .above_lowest = true});
    params.number({.name = "weight_decay", .meaning = "decay of weights", .deepspeed = "same"},
                  optimizer.weight_decay, {.lowest = 0, .highest = kUnbounded});
    if (unknown) params.of_any_kind();
    for (std::size_t i = 0; i < types.size(); ++i) {
      bool is_first = true;
      for (std::size_t before = 0; before < i; ++before)
        is_first = is_first && types[before].options.type() != types[i].options.type();
      if (is_first) describe_options(params, types, i, unknown, optimizer);
    }
    params.then([&] { optimizer.options.set_learning_rate(optimizer.lr); });
  });
}

void describe_scheduler(Keys& keys, TrainConfig& config) {
  const std::vector<optim::ScheduleType> types = optim::schedule_types();
  std::vector<std::string_view> names;
  std::size_t chosen = 0;
  for (std::size_t i = 0; i < types.size(); ++i) {
    names.emplace_back(types[i].name);
    if (types[i].options.type() == config.scheduler.type()) chosen = i;
  }
  keys.choice({.name = "type",
               .meaning = "one of the types below; `Constant` is not DeepSpeed's",
               .deepspeed = "same"},
              chosen, names);
  keys.then([&] { config.scheduler = types[chosen].options; });
  const bool unknown = keys.is_wrong("type");
  keys.section({.name = "params"}, [&](Keys& params) {
    // A learning rate that is wrong by itself is not to be judged with others.
    const optim::RunFacts run{
        .learning_rate = config.optimizer.lr > 0 ? config.optimizer.lr : kHighestRate,
        .num_steps = config.max_steps.value_or(0)};
    if (unknown) params.of_any_kind();
    for (std::size_t i = 0; i < types.size(); ++i) {
      if (!params.has(i == chosen || unknown)) continue;
      params.chapter(types[i].name);
      params.call(types[i].name);
      OptionsAsKeys options(params);
      optim::ScheduleOptions other = types[i].options;
      (i == chosen ? config.scheduler : other).describe(options, run);
    }
  });
}

void describe_monitor(Keys& keys, MonitorSection& monitor, const Key& enabled,
                      const Key& output_path, const Key& job_name) {
  keys.boolean(enabled, monitor.enabled);
  keys.path(output_path, monitor.output_path);
  keys.text(job_name, monitor.job_name);
  keys.then([&] {
    if (monitor.job_name.find('/') == std::string::npos && monitor.job_name != "..") return;
    keys.mistake("job_name", fmt::format("is \"{}\": it must be the name of a folder, without '/'",
                                         monitor.job_name));
  });
}

void describe_checkpoint(Keys& keys, CheckpointSection& checkpoint) {
  keys.integer({.name = "interval", .meaning = "steps between checkpoints; 0: only at the end"},
               checkpoint.interval, {0, kMostSteps});
  keys.integer({.name = "keep", .meaning = "how many of the newest are kept"}, checkpoint.keep,
               {1, 1'000'000});
  keys.boolean({.name = "async",
                .meaning = "training goes on while a checkpoint is written: what a rank writes of "
                           "it is copied to the host first, and takes that much more memory there. "
                           "With `false` the run waits for the disk"},
               checkpoint.asynchronous);
  keys.integer(
      {.name = "memory_interval",
       .meaning =
           "steps between copies of the run's state in the ranks' own memory, each rank's also in "
           "that of a rank on another host, where there is one; 0: none. With `--max-restarts`, "
           "one lost rank or host costs the steps since the last of them, and not those since the "
           "last checkpoint ([checkpoints.md](checkpoints.md#in-the-ranks-memory))"},
      checkpoint.memory_interval, {0, kMostSteps});
  bool never = checkpoint.resume == Resume::never;
  if (keys.word_or_path(
          {.name = "resume",
           .meaning =
               "`\"auto\"`: from the newest checkpoint in the run's folder, where there is one; "
               "`\"never\"`: from nothing, in a folder where none was saved; or the folder of a "
               "checkpoint, not of its run, where the run's own folder has none of later steps"},
          "never", never, checkpoint.resume_from))
    checkpoint.resume = never ? Resume::never : Resume::from;
}

void describe_run(Keys& keys, TrainConfig& config) {
  keys.chapter("The run");
  keys.integer(
      {.name = "max_steps", .meaning = "optimizer steps", .by_default = "one of the two is needed"},
      config.max_steps, {1, kMostSteps});
  keys.integer(
      {.name = "epochs", .meaning = "passes over the data; with both, whichever ends first"},
      config.epochs, {1, kMostSteps});
  keys.integer({.name = "seed",
                .meaning = "of initial weights, dropout and the order of the data",
                .deepspeed = "same"},
               config.seed, {0, std::numeric_limits<std::int64_t>::max()});
  keys.path({.name = "output",
             .meaning = "the run's folder",
             .by_default = "`runs/<name of the config>`"},
            config.output);
  keys.section({.name = "validation"}, [&](Keys& inside) {
    inside.integer(
        {.name = "interval",
         .meaning = "steps between measurements of the validation loss; 0: only at the end"},
        config.validation.interval, {0, kMostSteps});
    inside.integer({.name = "batches", .meaning = "batches of one measurement; 0: the whole set"},
                   config.validation.batches, {0, kMostSteps});
  });
  keys.section({.name = "checkpoint"},
               [&](Keys& inside) { describe_checkpoint(inside, config.checkpoint); });
  keys.then([&] {
    config.tensorboard.output_path = config.output / "tensorboard";
    config.csv_monitor.output_path = config.output;
  });
  keys.section({.name = "tensorboard"}, [&](Keys& inside) {
    describe_monitor(inside, config.tensorboard,
                     {.name = "enabled",
                      .meaning = "whether TensorBoard event files are written",
                      .deepspeed = "same (false)"},
                     {.name = "output_path",
                      .meaning = "their folder",
                      .deepspeed = "same",
                      .by_default = "`<output>/tensorboard`"},
                     {.name = "job_name",
                      .meaning = "a folder in it",
                      .deepspeed = "same",
                      .by_default = "none"});
  });
  keys.section({.name = "csv_monitor"}, [&](Keys& inside) {
    describe_monitor(inside, config.csv_monitor,
                     {.name = "enabled",
                      .meaning = "whether metrics are written as CSV",
                      .deepspeed = "same (false)"},
                     {.name = "output_path",
                      .meaning = "its folder",
                      .deepspeed = "same",
                      .by_default = "`<output>`"},
                     {.name = "job_name",
                      .meaning = "a folder in it",
                      .deepspeed = "same",
                      .by_default = "none"});
  });
  keys.integer(
      {.name = "steps_per_print", .meaning = "steps between lines of the log", .deepspeed = "same"},
      config.steps_per_print, {1, kMostSteps});
  keys.boolean(
      {.name = "wall_clock_breakdown",
       .meaning =
           "whether the times of a step's parts (data, forward, backward, update) are measured and "
           "kept with the metrics; a GPU is waited for after each. With a pipeline all passes of a "
           "step, and their data, are counted as backward: its schedule mixes them",
       .deepspeed = "same"},
      config.wall_clock_breakdown);
  keys.boolean({.name = "dataloader_drop_last",
                .meaning = "whether a last step of an epoch that is not full is left out",
                .deepspeed = "same"},
               config.dataloader_drop_last);
  keys.choice({.name = "on_non_finite_loss",
               .meaning = "where a loss is NaN or infinite, `\"stop\"`, or `\"skip\"` the step, on "
                          "all ranks; more than 20 skipped in a row stop the run"},
              config.on_non_finite_loss, kOnNonFiniteLoss);
  keys.choice({.name = "device", .meaning = "`\"cpu\"`, `\"cuda\"`, or the GPU where there is one"},
              config.device, kDevices);
  std::string schema;
  if (keys.writes(false))
    keys.text({.name = "$schema",
               .meaning = "the path or address of a JSON Schema, which editors write and read; it "
                          "has no effect here",
               .by_default = "none"},
              schema);
  keys.section({.name = "communication"}, [&](Keys& inside) {
    inside.word(
        {.name = "backend",
         .meaning =
             "what ranks talk over. `\"auto\"`: shared memory inside a host and TCP between hosts; "
             "tensors on GPUs go by NCCL where every rank has a GPU of its own. `\"nccl\"`: the "
             "same, and an error where NCCL cannot be used. `\"shm\"`, `\"tcp\"`, `\"shm+tcp\"`: "
             "those alone, tensors on GPUs through the host's memory, sums with the same bits in "
             "every layout. `\"gloo\"`, `\"mpi\"`: that engine ([engines.md](engines.md)). The run "
             "says at its beginning what was chosen, and why",
         .deepspeed = "the `backend` of PyTorch's `init_process_group`"},
        config.backend, comm::backends::names());
  });
  keys.integer({.name = "timeout_seconds",
                .meaning = "how long ranks wait for each other before the run ends with an error "
                           "that names who is missing"},
               config.timeout_seconds, {1, 7 * 24 * 3600});
  keys.choice(
      {.name = "exchange_gradients",
       .meaning = "when ranks sum the gradients of the passes of a step "
                  "(`gradient_accumulation_steps`). `\"each_pass\"`: between passes a rank keeps "
                  "the sums over all ranks, and of those its part where gradients are cut. "
                  "`\"last_pass\"`: it keeps the whole gradients of its own passes, and a step "
                  "has one exchange. `\"auto\"`: the first where gradients are cut (stage 2, 3 "
                  "and `\"HYBRID_SHARD\"`), else the second. Strategies agree to the bit where "
                  "this is the same ([sharding.md](sharding.md)). A pipeline's micro-batches are "
                  "always summed after the last",
       .deepspeed = "`no_sync()`"},
      config.exchange_gradients, kExchanges);
  keys.integer({.name = "consistency_check_interval",
                .meaning = "steps between comparisons of the parameters that several ranks hold: "
                           "where they differ, the run ends with an error that names a parameter "
                           "and the ranks. The first step compares, too. 0: never. It costs less "
                           "than 0.1 % of a step ([reliability.md](reliability.md))",
                .deepspeed = "Megatron's `--check-weight-hash-across-dp-replicas-interval`"},
               config.consistency_check_interval, {0, kMostSteps});
  keys.integer({.name = "threads_per_rank",
                .meaning = "threads of one rank",
                .by_default = "`OMP_NUM_THREADS`, or else the cores that the launcher bound the "
                              "rank to, or else the host's divided among its ranks",
                .zero_is_auto = true},
               config.threads_per_rank, {1, 4096});
  keys.section({.name = "activation_checkpointing"}, [&](Keys& inside) {
    inside.number({.name = "ratio",
                   .meaning = "the share of the model's blocks, evenly spread, whose activations "
                              "are not kept but computed again in backward; the result is the same",
                   .deepspeed = "the model's code"},
                  config.recomputed_blocks, kRatio);
  });
  const JsonSection::Range size = {.lowest = 0, .highest = kMostMegabytes, .above_lowest = true};
  keys.section({.name = "ddp"}, [&](Keys& inside) {
    inside.number({.name = "first_bucket_mb",
                   .meaning = "size of the gradient bucket that is reduced first, in MiB"},
                  config.ddp.first_bucket_mb, size);
    inside.number({.name = "bucket_mb", .meaning = "size of the others (PyTorch: `bucket_cap_mb`)"},
                  config.ddp.bucket_mb, size);
    inside.boolean(
        {.name = "find_unused_parameters",
         .meaning =
             "for models of which a step may leave parameters out; costs one small message a step"},
        config.ddp.find_unused_parameters);
  });
}

// As docs/config.md writes it: `"1f1b"`.
std::string quoted(pipeline::ScheduleKind kind) {
  return fmt::format("`\"{}\"`", pipeline::name_of(kind));
}

void describe_schedule(Keys& keys, ParallelSection& parallel) {
  std::vector<Named<pipeline::ScheduleKind>> schedules;
  std::vector<std::string> names;
  for (const pipeline::ScheduleKind kind : pipeline::schedule_kinds()) {
    schedules.push_back({pipeline::name_of(kind), kind});
    names.push_back(quoted(kind));
  }
  const std::string last = names.back();
  names.pop_back();
  keys.choice({.name = "schedule",
               .meaning = fmt::format("of the pipeline: {} or {} ([pipeline.md](pipeline.md))",
                                      fmt::join(names, ", "), last)},
              parallel.schedule, std::span<const Named<pipeline::ScheduleKind>>(schedules));
}

void describe_chunks(Keys& keys, ParallelSection& parallel) {
  std::map<int, std::vector<std::string>> schedules_of;
  for (const pipeline::ScheduleKind kind : pipeline::schedule_kinds())
    if (const int chunks = pipeline::definition_of(kind).num_chunks; chunks != 1)
      schedules_of[chunks].push_back(quoted(kind));
  std::string by_default;
  for (const auto& [chunks, schedules] : schedules_of)
    by_default += fmt::format("{} for {}, ", chunks, fmt::join(schedules, " and "));
  keys.integer({.name = "chunks",
                .meaning = "stages a rank",
                .deepspeed = "`--num-virtual-stages-per-pipeline-rank`",
                .by_default = by_default + "else 1"},
               parallel.chunks, {1, 64});
}

void describe_parallel(Keys& keys, ParallelSection& parallel) {
  keys.integer({.name = "data",
                .meaning = "how many ranks have samples of their own; -1: as many as the other "
                           "axes leave. `data` × `tensor` × `pipeline` × `context` is the number "
                           "of ranks ([parallel.md](parallel.md))",
                .deepspeed = "`data_parallel_size`"},
               parallel.data, {-1, kMostOnAnAxis});
  keys.integer(
      {.name = "tensor",
       .meaning = "ranks that have a part of each layer; divides the heads",
       .deepspeed = "`tensor_parallel.autotp_size`; Megatron's `--tensor-model-parallel-size`"},
      parallel.tensor, {1, kMostOnAnAxis});
  keys.integer({.name = "pipeline",
                .meaning = "ranks that have some of the layers each; the micro-batches of a step "
                           "(`gradient_accumulation_steps`) go through them",
                .deepspeed = "`--pipeline-model-parallel-size`"},
               parallel.pipeline, {1, kMostOnAnAxis});
  keys.integer(
      {.name = "context",
       .meaning = "ranks that have a part of each sequence, whose length must be a multiple of "
                  "twice as many",
       .deepspeed = "`sequence_parallel_size` (with `\"all_to_all\"`); `--context-parallel-size`"},
      parallel.context, {1, kMostOnAnAxis});
  keys.boolean({.name = "sequence_parallel",
                .meaning = "between layers each rank of the tensor axis has a slice of the "
                           "sequence, which saves memory; backward gathers it once more",
                .deepspeed = "`--sequence-parallel`"},
               parallel.sequence_parallel);
  keys.choice({.name = "context_algorithm",
               .meaning = "or `\"all_to_all\"`, where the heads divide ([context.md](context.md))",
               .deepspeed = "`--cp-comm-type`"},
              parallel.context_algorithm, kContextAlgorithms);
  // Only a pipeline has the keys below.
  if (!keys.writes(parallel.pipeline > 1)) return;
  if (keys.writes(parallel.schedule_file.empty())) describe_schedule(keys, parallel);
  if (keys.writes(!parallel.schedule_file.empty()))
    keys.path({.name = "schedule_file",
               .meaning = "a schedule that `lockstep plan schedule --write` made, or a hand, in "
                          "place of the two above"},
              parallel.schedule_file);
  if (keys.writes(parallel.chunks > 0)) describe_chunks(keys, parallel);
  if (keys.writes(parallel.stage_layers.empty()))
    keys.choice(
        {.name = "balance",
         .meaning =
             "what stages have equally much of: `\"layers\"`, `\"parameters\"`, `\"compute\"` "
             "(multiplications for a token) or `\"time\"` (measured when the run starts)"},
        parallel.balance, kStageBalances);
  if (keys.writes(!parallel.stage_layers.empty()))
    keys.integers(
        {.name = "stage_layers",
         .meaning = "how many layers each stage has, first to last, in place of `balance`",
         .deepspeed = "`--pipeline-model-parallel-layout`"},
        parallel.stage_layers, {1, kMostOnAnAxis});
  keys.integer({.name = "timeline_step",
                .meaning = "the step whose timeline is drawn, as `timeline.svg` in the run's "
                           "folder and in the terminal at the end; 0: none"},
               parallel.timeline_step, {0, kMostSteps});
}

// The strategy may be said in three places; check_sharding() compares them.
void describe_sharding(Keys& keys, TrainConfig& config) {
  keys.chapter("Ranks and what they share");
  ShardingSection& sharding = config.sharding;
  keys.choice(
      {.name = "sharding_strategy",
       .meaning = "what is cut among the ranks, with the same result: nothing (`\"NO_SHARD\"`, "
                  "stage 0), the optimizer's state (`\"SHARD_OPTIMIZER\"`, 1), gradients too "
                  "(`\"SHARD_GRAD_OP\"`, 2), parameters too (`\"FULL_SHARD\"`, 3), or all of it "
                  "within groups of ranks that hold a copy each (`\"HYBRID_SHARD\"`)",
       .deepspeed = "`zero_optimization.stage`"},
      sharding.strategy, kShardings);
  keys.section({.name = "parallel"}, [&](Keys& inside) {
    describe_parallel(inside, config.parallel);
    ShardingStrategy there = sharding.strategy;
    if (inside.writes(false))
      inside.choice(
          {.name = "sharding_strategy", .meaning = "another place for `sharding_strategy`"}, there,
          kShardings);
  });
  if (keys.writes(!config.tensor_plan.empty()))
    keys.choices(
        {.name = "tensor_plan",
         .meaning = "which layers of a program's own model `parallel.tensor` cuts, by their "
                    "names, and how: `{\"blocks.*.fc1\": \"column\", \"blocks.*.fc2\": "
                    "\"row\", \"blocks.*.attention\": \"heads\"}` ([tensor.md](tensor.md)); the "
                    "built-in models know that themselves",
         .deepspeed = "`parallelize_module`'s plan in PyTorch",
         .by_default = "none"},
        config.tensor_plan, kLayerCuts);
  keys.section({.name = "fsdp"}, [&](Keys& inside) {
    if (inside.writes(sharding.ranks_per_copy > 0))
      inside.integer({.name = "ranks_per_copy",
                      .meaning = "how many ranks hold a copy together with `\"HYBRID_SHARD\"`",
                      .by_default = "the ranks of a host"},
                     sharding.ranks_per_copy, {1, kMostRanks});
    inside.integer({.name = "max_live_units",
                    .meaning = "blocks of the model that are whole on a rank at once, the next one "
                               "included, where parameters are cut"},
                   sharding.max_live_units, {1, kMostRanks});
  });
  keys.section({.name = "zero_optimization"}, [&](Keys& zero) {
    std::int64_t stage = 0;
    if (zero.writes(false))
      zero.integer({.name = "stage",
                    .meaning = "another way to say `sharding_strategy`, 0 to 3",
                    .deepspeed = "same"},
                   stage, {0, kLastStage});
    zero.section({.name = "offload_optimizer"}, [&](Keys& offload) {
      offload.choice(
          {.name = "device",
           .meaning = "`\"cpu\"`: the optimizer's state, what it steps on and its gradients are in "
                      "the host's memory, and the update runs on the host's cores; stage 2, 3 and "
                      "`\"HYBRID_SHARD\"` ([sharding.md](sharding.md#offload))",
           .deepspeed = "same",
           .refused = "nvme",
           .refused_because = kNoDisks},
          sharding.offload_optimizer, kOffloadDevices);
    });
    zero.section({.name = "offload_param"}, [&](Keys& offload) {
      offload.choice({.name = "device",
                      .meaning = "`\"cpu\"`: a rank's part of the parameters, too; stage 3 and "
                                 "`\"HYBRID_SHARD\"`. The optimizer goes with them",
                      .deepspeed = "same",
                      .refused = "nvme",
                      .refused_because = kNoDisks},
                     sharding.offload_param, kOffloadDevices);
    });
    ZeroPlusPlusSection& plus = sharding.zero_plus_plus;
    zero.boolean({.name = "zero_quantized_weights",
                  .meaning = "parameters are gathered as int8; stage 3 and `\"HYBRID_SHARD\"` "
                             "([sharding.md](sharding.md#zero))",
                  .deepspeed = "same"},
                 plus.quantized_weights);
    zero.boolean({.name = "zero_quantized_gradients",
                  .meaning = "gradients are summed from int4; stage 2, 3 and `\"HYBRID_SHARD\"`",
                  .deepspeed = "same"},
                 plus.quantized_gradients);
    zero.integer({.name = "zero_hpz_partition_size",
                  .meaning = "so many consecutive ranks make a node, within which parameters are "
                             "gathered again in backward; divides the ranks. 1: no nodes",
                  .deepspeed = "same"},
                 plus.hpz_partition_size, {1, kMostRanks});
  });
}

void describe_precision(Keys& keys, PrecisionSection& precision) {
  keys.chapter("Precision");
  bool bf16 = precision.compute == Precision::bf16, fp16 = precision.compute == Precision::fp16;
  bool bf16_masters = bf16 && precision.narrow_masters;
  bool fp16_masters = fp16 && precision.narrow_masters;
  const auto rounding = [&](Keys& inside) {
    inside.boolean({.name = "stochastic_rounding",
                    .meaning = "whether the optimizer rounds what it writes in 16 bits up or down "
                               "at random, by the seed, the step and the element; else to the "
                               "nearest, where small steps are lost",
                    .deepspeed = "always to the nearest"},
                   precision.stochastic_rounding);
  };
  keys.section({.name = "bf16"}, [&](Keys& inside) {
    inside.boolean(
        {.name = "enabled", .meaning = "trains in bf16", .deepspeed = "same, also as `bfloat16`"},
        bf16);
    inside.boolean(
        {.name = "bf16_master_weights_and_grads",
         .meaning = "keeps no weights and gradients in fp32: the optimizer steps on bf16 "
                    "([sharding.md](sharding.md#weights-of-16-bits)); stage 2, 3 and "
                    "`\"HYBRID_SHARD\"`",
         .deepspeed = "same"},
        bf16_masters);
    inside.boolean({.name = "bf16_optimizer_states",
                    .meaning = "keeps the optimizer's state in bf16, too",
                    .deepspeed = "same"},
                   precision.narrow_states);
    rounding(inside);
  });
  keys.section({.name = "fp16"}, [&](Keys& inside) {
    constexpr double kLargest = std::numeric_limits<float>::max();
    optim::LossScaleOptions& scale = precision.loss_scale;
    inside.boolean({.name = "enabled",
                    .meaning = "trains in fp16, with a loss scale; not together with bf16",
                    .deepspeed = "same"},
                   fp16);
    inside.boolean({.name = "fp16_master_weights_and_grads",
                    .meaning = "keeps no weights and gradients in fp32, as "
                               "`bf16_master_weights_and_grads`: what of a gradient is below 6e-8 "
                               "is lost",
                    .deepspeed = "same"},
                   fp16_masters);
    rounding(inside);
    inside.number({.name = "loss_scale",
                   .meaning = "a scale that stays; 0: one that finds itself, with the keys below",
                   .deepspeed = "same"},
                  scale.loss_scale, {.lowest = 0, .highest = kLargest});
    std::int64_t power = scale.initial_scale_power;
    inside.integer({.name = "initial_scale_power",
                    .meaning = "it starts at two to this power",
                    .deepspeed = "same"},
                   power, {0, std::numeric_limits<float>::max_exponent - 1});
    scale.initial_scale_power = static_cast<int>(power);
    inside.integer({.name = "loss_scale_window",
                    .meaning = "good steps in a row after which it doubles",
                    .deepspeed = "same"},
                   scale.loss_scale_window, {1, kMostInt32});
    inside.integer({.name = "hysteresis",
                    .meaning = "overflows before it is halved the first time",
                    .deepspeed = "same"},
                   scale.hysteresis, {1, kMostInt32});
    inside.boolean({.name = "consecutive_hysteresis",
                    .meaning = "whether a good step makes the hysteresis full again",
                    .deepspeed = "same"},
                   scale.consecutive_hysteresis);
    inside.number(
        {.name = "min_loss_scale",
         .meaning = "the least it may be; where gradients overflow at that, training stops",
         .deepspeed = "same"},
        scale.min_loss_scale, {.lowest = 0, .highest = kLargest, .above_lowest = true});
  });
  keys.then([&] {
    precision.compute = bf16 ? Precision::bf16 : fp16 ? Precision::fp16 : Precision::fp32;
    precision.narrow_masters = bf16_masters || fp16_masters;
  });
  keys.choice({.name = "communication_data_type",
               .meaning = "`\"bf16\"` or `\"fp16\"`: what gradients travel in between ranks, added "
                          "up in fp32; stage 2, 3 and `\"HYBRID_SHARD\"`. With `\"fp16\"` the loss "
                          "has a scale, by the keys of `fp16`",
               .deepspeed = "same (fp16 with `fp16`)"},
              precision.gradients, kPrecisions);
}

}  // namespace

void describe(Keys& keys, TrainConfig& config) {
  const bool has_model = config.model_of == ModelOf::config;
  // A model's positions are by default those of the data; the tables have the model first.
  keys.section({.name = "data",
                .needed = has_model ? "say what is trained on, for example \"data\": {\"train\": "
                                      "\"input.txt\", \"sequence_length\": 256}"
                                    : ""},
               [&](Keys& inside) { describe_data(inside, config, config.data); });
  if (keys.has(has_model))
    keys.section({.name = "model",
                  .needed = "say what is trained, for example \"model\": {\"family\": \"gpt2\", "
                            "\"hidden_size\": 384, \"num_layers\": 6, \"num_heads\": 6}"},
                 [&](Keys& inside) { describe_model(inside, config.data, config.model); });
  describe_batch(keys, config);
  describe_run(keys, config);
  keys.chapter("Optimizer and schedule");
  keys.section({.name = "optimizer",
                .needed = "say how to train, for example \"optimizer\": {\"type\": \"AdamW\", "
                          "\"params\": {\"lr\": 3e-4}}"},
               [&](Keys& inside) { describe_optimizer(inside, config.optimizer); });
  keys.number({.name = "gradient_clipping",
               .meaning = "largest norm of all gradients together; 0: no limit. `max_grad_norm` in "
                          "`params` is an error, as in DeepSpeed",
               .deepspeed = "same"},
              config.gradient_clipping, {.lowest = 0, .highest = 1e30});
  keys.section({.name = "scheduler"}, [&](Keys& inside) { describe_scheduler(inside, config); });
  describe_sharding(keys, config);
  describe_precision(keys, config.precision);
}

}  // namespace lockstep::train
