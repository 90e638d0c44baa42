// The config of a training run, as `lockstep train config.json` reads it. docs/config.md explains
// every key; the names are DeepSpeed's where it has one.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <lockstep/data/tokens/token_format.h>
#include <lockstep/mesh/placement/sequence_positions.h>
#include <lockstep/optim/adamw/plain/options.h>
#include <lockstep/optim/schedules/loss_scale.h>
#include <lockstep/optim/schedules/schedule.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/parallel/shard/sizes/strategy.h>
#include <lockstep/plan/precision.h>

namespace lockstep::train {

struct ModelSection {
  // A Hugging Face folder whose model is trained further; where it is set, nothing below is.
  std::filesystem::path from;
  std::string family = "gpt2";  // a models::Family's name
  std::int64_t vocab_size = 0;  // 0: as many as the data has, 256 for text
  std::int64_t hidden_size = 0;
  std::int64_t num_layers = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t max_positions = 0;
  double dropout = 0;
  bool tie_embeddings = true;
  double norm_eps = 1e-5;
  double rope_theta = 10000;
};

struct DataSection {
  std::vector<std::filesystem::path> train;
  std::vector<std::filesystem::path> validation;
  double validation_fraction = 0.1;            // of `train`, where `validation` is empty; 0: none
  std::string format{data::kAutomaticFormat};  // a name of data::token_formats(), or "auto"
  std::int64_t sequence_length = 0;
  std::int64_t num_workers = 1;  // 0: batches are made by the thread that trains
  std::int64_t prefetch = 2;     // batches that wait ready, for each worker
};

// The batch that the user asks for; resolve_batch() works out the rest for a number of ranks. The
// keys are DeepSpeed's train_batch_size, train_micro_batch_size_per_gpu and
// gradient_accumulation_steps.
struct BatchSection {
  std::optional<std::int64_t> global;
  std::optional<std::int64_t> micro;
  std::optional<std::int64_t> accumulation;

  bool operator==(const BatchSection&) const = default;
};

// Chooses the batch instead of BatchSection. The keys are DeepSpeed's max_train_batch_size,
// micro_batch_sizes, min_gpus, max_gpus and prefer_larger_batch.
struct ElasticitySection {
  std::int64_t max_global = 0;
  std::vector<std::int64_t> micro_batches;  // rising, each once
  std::int64_t min_ranks = 1;
  std::int64_t max_ranks = 10'000;
  bool prefer_larger = true;

  bool operator==(const ElasticitySection&) const = default;
};

struct OptimizerSection {
  std::string type = "AdamW";  // the first of the names of an optim::OptimizerType
  double lr = 0;
  double weight_decay = 0;
  optim::OptimizerOptions options = optim::AdamWOptions{};
};

struct MonitorSection {
  bool enabled = true;
  std::filesystem::path output_path;
  std::string job_name;

  // Where the files go.
  std::filesystem::path folder() const {
    return job_name.empty() ? output_path : output_path / job_name;
  }
};

struct ValidationSection {
  std::int64_t interval = 500;  // steps; 0: only at the end
  std::int64_t batches = 50;    // global batches of a validation; 0: the whole set
};

// Where a run begins. Generations of a job that are formed later, when ranks or hosts are lost or
// come, go on with the run once one of them has begun it, from the newest that it has saved since.
enum class Resume {
  automatic,  // from the newest checkpoint of the run's folder; from nothing where it has none
  never,      // from nothing, in a folder without checkpoints
  from,       // from resume_from
};

struct CheckpointSection {
  std::int64_t interval = 1000;  // steps; 0: only at the end
  std::int64_t keep = 2;         // the newest so many
  bool asynchronous = true;      // training goes on while they are written
  // Steps between copies in other ranks' memory; 0: none.
  std::int64_t memory_interval = 0;
  Resume resume = Resume::automatic;
  std::filesystem::path resume_from;
};

struct DdpSection {
  double first_bucket_mb = 1;
  double bucket_mb = 25;
  bool find_unused_parameters = true;
};

// ZeRO++, by DeepSpeed's names.
struct ZeroPlusPlusSection {
  bool quantized_weights = false;
  bool quantized_gradients = false;
  std::int64_t hpz_partition_size = 1;  // consecutive ranks that make a node; 1: no nodes
};

enum class OffloadDevice { none, cpu };

struct ShardingSection {
  ShardingStrategy strategy = ShardingStrategy::NO_SHARD;  // zero_optimization.stage 0 to 3
  std::int64_t ranks_per_copy = 0;                         // of hybrid; 0: the ranks of a host
  std::int64_t max_live_units = 2;
  OffloadDevice offload_optimizer = OffloadDevice::none;
  OffloadDevice offload_param = OffloadDevice::none;
  ZeroPlusPlusSection zero_plus_plus;
};

// How a plain torch::nn layer is cut over a tensor axis (tensor::Cut).
enum class LayerCut { column, row, heads, qkv };

// What is shared out evenly over the stages of a pipeline.
enum class StageBalance {
  layers,
  parameters,  // an embedding's and a head's among them
  compute,     // multiplications for a token, counted
  time,        // measured, when the run starts
};

// How many ranks lie along each axis of the mesh; their product is all of them.
struct ParallelSection {
  std::int64_t data = -1;  // ranks with samples of their own; -1: what the others leave
  std::int64_t tensor = 1;
  std::int64_t pipeline = 1;
  std::int64_t context = 1;
  bool sequence_parallel = false;
  mesh::ContextAlgorithm context_algorithm = mesh::ContextAlgorithm::ring;
  pipeline::ScheduleKind schedule = pipeline::ScheduleKind::one_forward_one_backward;
  std::int64_t chunks = 0;              // stages a rank; 0: the schedule's own
  std::filesystem::path schedule_file;  // in place of the two above
  StageBalance balance = StageBalance::layers;
  std::vector<std::int64_t> stage_layers;  // of each stage; where empty, as balanced
  std::int64_t timeline_step = 0;          // whose timeline is drawn; 0: none

  // How many ranks work together on the same samples.
  std::int64_t ranks_together() const { return tensor * pipeline * context; }
};

using plan::Precision;

struct PrecisionSection {
  Precision compute = Precision::fp32;    // bf16.enabled, fp16.enabled
  optim::LossScaleOptions loss_scale;     // of fp16
  Precision gradients = Precision::fp32;  // between ranks: communication_data_type
  // Whether the weights that the optimizer steps on, and their gradients, have the 16 bits of
  // `compute`: bf16_master_weights_and_grads, fp16_master_weights_and_grads.
  bool narrow_masters = false;
  bool narrow_states = false;       // the optimizer's, too: bf16_optimizer_states
  bool stochastic_rounding = true;  // of those; else to the nearest
};

// The reaction to a step whose loss or gradient is not a number, or infinite.
enum class NonFinite {
  stop,  // the same step on every rank, with the weights before it
  skip,  // leave the weights as they are and go on
};
enum class DeviceChoice { automatic, cpu, cuda };

// Whose model, data and loop a config is for.
enum class ModelOf {
  config,   // `lockstep train`: the config describes them
  program,  // lockstep::initialize(): the program has them, and the config says how it trains
};

struct TrainConfig {
  ModelOf model_of = ModelOf::config;
  ModelSection model;
  DataSection data;
  BatchSection batch;
  std::optional<ElasticitySection> elasticity;
  OptimizerSection optimizer;
  // A total_num_steps of 0 is the number of steps of the run, which only the data tells: `epochs`
  // was given, and not max_steps.
  optim::ScheduleOptions scheduler;
  double gradient_clipping = 1.0;  // 0: none
  std::optional<std::int64_t> max_steps;
  std::optional<std::int64_t> epochs;  // with max_steps too, whichever ends first
  std::int64_t seed = 1234;
  std::filesystem::path output;  // the run's folder
  ValidationSection validation;
  CheckpointSection checkpoint;
  MonitorSection tensorboard;
  MonitorSection csv_monitor;
  std::int64_t steps_per_print = 10;
  bool wall_clock_breakdown = false;
  bool dataloader_drop_last = false;
  NonFinite on_non_finite_loss = NonFinite::stop;
  DdpSection ddp;
  ShardingSection sharding;
  ParallelSection parallel;
  PrecisionSection precision;
  // Of a program's model: names of layers, in which "*" stands for any text without a dot.
  std::vector<std::pair<std::string, LayerCut>> tensor_plan;
  double recomputed_blocks = 0;  // the share of blocks whose activations backward computes again
  DeviceChoice device = DeviceChoice::automatic;
  std::string backend = "auto";  // what ranks talk over: communication.backend
  std::int64_t timeout_seconds = 600;
  // Steps between checks that ranks hold the same values where they should; 0: none.
  ExchangeGradients exchange_gradients = ExchangeGradients::automatic;
  std::int64_t consistency_check_interval = 1000;
  std::int64_t threads_per_rank = 0;  // 0: the cores divided among the ranks of a host
};

struct ConfigSource {
  std::string name = "config.json";         // for messages
  std::filesystem::path folder = ".";       // what relative paths in the file are relative to
  std::vector<std::string> overrides = {};  // as --set has them; their paths are relative to "."
  ModelOf model_of = ModelOf::config;
};

// Reads and checks all that can be checked without looking at the disk. Paths become absolute.
// UsageError naming every mistake, each with its line or flag.
TrainConfig parse_config(std::string_view text, const ConfigSource& source);

// How much is known about the files that a config names.
enum class NamedFiles {
  checked,  // they can be read, and the output written
  // The same, but for the checkpoint that the run began from, which may have been removed since.
  of_run_under_way,
  unknown,  // for planning a run whose data is elsewhere
};

class JsonReader;

// A config as it was read, with the mistakes found so far; a wrong value has its default. Code that
// knows the number of ranks and the files adds mistakes of its own, so that the user sees all of
// them at once. Threading: one thread.
class ConfigDraft {
 public:
  // A config that was read before, without mistakes.
  explicit ConfigDraft(TrainConfig config);
  ConfigDraft(TrainConfig config, std::unique_ptr<JsonReader> reader);
  ConfigDraft(ConfigDraft&&) noexcept;
  ConfigDraft& operator=(ConfigDraft&&) noexcept;
  ~ConfigDraft();

  const TrainConfig& config() const { return config_; }

  // Makes a check that reads these keys, unless one of them is wrong by itself. Its UsageError
  // becomes a mistake in the line of the first key. Says whether the check was made and passed.
  bool check(std::span<const std::string_view> keys, const std::function<void()>& check);
  bool check(std::initializer_list<std::string_view> keys, const std::function<void()>& check) {
    return this->check(std::span(keys.begin(), keys.size()), check);
  }

  bool has_mistakes() const;
  // Keys of DeepSpeed's that are there and change nothing here.
  const std::vector<std::string>& without_effect() const;
  // UsageError naming every mistake, each with its line or flag, where there are any.
  void finish();

 private:
  TrainConfig config_;
  std::unique_ptr<JsonReader> reader_;
};

// The draft of a text, whose files nobody looks at. UsageError where it is no JSON.
ConfigDraft draft_config(std::string_view text, const ConfigSource& source);

// The draft of a file. UsageError where it cannot be read, or is no JSON.
ConfigDraft read_config(const std::filesystem::path& path,
                        const std::vector<std::string>& overrides = {},
                        NamedFiles files = NamedFiles::checked, ModelOf model_of = ModelOf::config);

// Tells in the log which keys of DeepSpeed's are there and change nothing; nothing where none is.
void warn_of_keys_without_effect(const ConfigDraft& draft);

// The draft, finished.
TrainConfig load_config(const std::filesystem::path& path,
                        const std::vector<std::string>& overrides = {},
                        NamedFiles files = NamedFiles::checked);

// The rows of docs/config.md's tables, by the heading that they stand under.
std::map<std::string, std::string> key_tables();

// A JSON Schema of configs, for editors.
std::string config_schema();

// The whole config with every default written out; parse_config of it gives the same config.
std::string to_json(const TrainConfig& config);

}  // namespace lockstep::train
