#include <lockstep/train/preflight/resume_check.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <spdlog/fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/base/file.h>
#include <lockstep/base/hash.h>
#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/models/folders/hugging_face_folder.h>
#include <lockstep/models/spec/family.h>
#include <lockstep/optim/registry/registry.h>
#include <lockstep/train/config/names.h>
#include <lockstep/train/preflight/run_start.h>

namespace lockstep::train {

namespace {

namespace fs = std::filesystem;

fs::path checkpoints_in(const fs::path& output) { return output / "checkpoints"; }

std::vector<std::string> differences(const models::ModelConfig& now,
                                     const models::ModelConfig& then) {
  std::vector<std::string> found;
  const auto compare = [&](const char* key, const auto& mine, const auto& theirs) {
    if (mine != theirs) found.push_back(fmt::format("model.{} is {}, was {}", key, mine, theirs));
  };
  compare("family", now.family, then.family);
  compare("vocab_size", now.vocab_size, then.vocab_size);
  compare("hidden_size", now.hidden_size, then.hidden_size);
  compare("num_layers", now.num_layers, then.num_layers);
  compare("num_heads", now.num_heads, then.num_heads);
  compare("num_kv_heads", now.num_kv_heads, then.num_kv_heads);
  compare("intermediate_size", now.intermediate_size, then.intermediate_size);
  compare("max_positions", now.max_positions, then.max_positions);
  compare("tie_embeddings", now.tie_embeddings, then.tie_embeddings);
  compare("norm_eps", now.norm_eps, then.norm_eps);
  if (models::family_named(now.family).rotary)
    compare("rope_theta", now.rope_theta, then.rope_theta);
  return found;
}

// The optimizer, and the state that it keeps for each parameter, which another one cannot use.
std::string kept_by(const OptimizerSection& optimizer) {
  const std::vector<std::string> kept = optimizer.options.state_names();
  return kept.empty() ? fmt::format("{} without state", optim::name_of(optimizer.options))
                      : fmt::format("{} with {}", optim::name_of(optimizer.options),
                                    fmt::join(kept, " and "));
}

// The tokens that were trained on; nothing where the checkpoint does not say.
std::optional<DataDigest> digest_in(checkpoint::CheckpointReader& reader) {
  if (!reader.manifest().files.contains(kDataFile)) return std::nullopt;
  return parse_digest(reader.read_text_file(kDataFile), (reader.path() / kDataFile).string());
}

std::string number_text(const std::optional<std::int64_t>& value) {
  return value ? std::to_string(*value) : "\"auto\"";
}

// Settings that a run may change when it is resumed, and has changed.
std::vector<std::string> changed_settings(const TrainConfig& now, const TrainConfig& then) {
  std::vector<std::string> found;
  const auto compare = [&](const char* key, const auto& mine, const auto& before) {
    if (mine != before) found.push_back(fmt::format("{} is {}, was {}", key, mine, before));
  };
  compare("train_batch_size", number_text(now.batch.global), number_text(then.batch.global));
  compare("train_micro_batch_size_per_gpu", number_text(now.batch.micro),
          number_text(then.batch.micro));
  compare("gradient_accumulation_steps", number_text(now.batch.accumulation),
          number_text(then.batch.accumulation));
  compare("optimizer.params.lr", now.optimizer.lr, then.optimizer.lr);
  compare("optimizer.params.weight_decay", now.optimizer.weight_decay, then.optimizer.weight_decay);
  const auto mine = optim::texts_of(now.optimizer.options);
  const auto before = optim::texts_of(then.optimizer.options);
  // Another optimizer is another run.
  for (std::size_t i = 0; i < std::min(mine.size(), before.size()); ++i)
    compare(("optimizer.params." + mine[i].key).c_str(), mine[i].value, before[i].value);
  compare("gradient_clipping", now.gradient_clipping, then.gradient_clipping);
  compare("model.dropout", now.model.dropout, then.model.dropout);
  compare("the precision", name_of(now.precision.compute, kPrecisions),
          name_of(then.precision.compute, kPrecisions));
  compare("stochastic_rounding", now.precision.stochastic_rounding,
          then.precision.stochastic_rounding);
  compare("communication_data_type", name_of(now.precision.gradients, kPrecisions),
          name_of(then.precision.gradients, kPrecisions));
  compare("exchange_gradients", name_of(now.exchange_gradients), name_of(then.exchange_gradients));
  compare("sharding_strategy", name_of(now.sharding.strategy), name_of(then.sharding.strategy));
  compare("parallel.data", now.parallel.data, then.parallel.data);
  compare("parallel.tensor", now.parallel.tensor, then.parallel.tensor);
  compare("parallel.pipeline", now.parallel.pipeline, then.parallel.pipeline);
  compare("parallel.context", now.parallel.context, then.parallel.context);
  compare("zero_quantized_weights", now.sharding.zero_plus_plus.quantized_weights,
          then.sharding.zero_plus_plus.quantized_weights);
  compare("zero_quantized_gradients", now.sharding.zero_plus_plus.quantized_gradients,
          then.sharding.zero_plus_plus.quantized_gradients);
  if (now.scheduler.type() != then.scheduler.type()) found.emplace_back("scheduler is another");
  return found;
}

// The step that a run begins or began with, where it finds no checkpoint of its own.
std::int64_t first_step(const Beginning& told,
                        const std::optional<checkpoint::TrainingState>& start) {
  if (start) return start->step;  // what it was told to begin from may have been removed since
  if (told.resume != Resume::from) return 0;
  return checkpoint::CheckpointReader(told.from).manifest().state.step;
}

std::string way_out(const TrainConfig& config) {
  return fmt::format(
      "Put back what differs, or train another model in a folder of its own: --set output=FOLDER "
      "(it is '{}')",
      config.output.string());
}

}  // namespace

std::vector<checkpoint::Checkpoint> to_go_on_from(
    const fs::path& output, const Beginning& told,
    const std::optional<checkpoint::TrainingState>& start) {
  auto all = checkpoint::list_checkpoints(checkpoints_in(output));
  if (told.resume == Resume::automatic) return all;
  const std::int64_t first = first_step(told, start);
  std::erase_if(all, [&](const checkpoint::Checkpoint& one) { return one.step <= first; });
  if (!start && !all.empty())
    throw UsageError(
        "this run would begin at step {}, and '{}' has checkpoints of another up to step {}, which "
        "would be taken for newer ones: choose another output folder, remove those, or go on from "
        "the newest (checkpoint.resume \"auto\")",
        first, checkpoints_in(output).string(), all.back().step);
  return all;
}

void check_nothing_lost(const fs::path& output, const Beginning& told,
                        const std::optional<checkpoint::TrainingState>& start) {
  // A job that has begun this run goes back to the checkpoint that it began from, as to any other.
  if (start && told.resume == Resume::from) return;
  const auto saved = saved_before(output);
  if (!saved || (told.resume != Resume::automatic && *saved <= first_step(told, start))) return;
  std::string aside;
  for (const checkpoint::Checkpoint& one : checkpoint::list_set_aside(checkpoints_in(output)))
    aside = fmt::format(" ('{}' was set aside)", one.path.filename().string());
  throw UsageError(
      "step {} of a run was saved in '{}', and no checkpoint there is whole{}: nothing to go on "
      "from. Steps that were trained are not begun anew in the same folder: put a copy of a "
      "checkpoint into '{}', or train in a new folder (--set output=FOLDER), or remove this one",
      std::max(*saved, saved_last(output).value_or(0)), output.string(), aside,
      checkpoints_in(output).string());
}

std::optional<std::int64_t> newest_is_gone(const fs::path& output) {
  const auto saved = saved_last(output);
  if (!saved) return std::nullopt;
  for (const auto& list : {checkpoint::list_checkpoints, checkpoint::list_set_aside})
    for (const checkpoint::Checkpoint& one : list(checkpoints_in(output)))
      if (one.step >= *saved) return std::nullopt;
  return saved;
}

std::optional<fs::path> checkpoint_to_resume(const TrainConfig& config, const FolderHolder& now) {
  const Beginning told{.resume = config.checkpoint.resume, .from = config.checkpoint.resume_from};
  const auto start = begun_before(config.output, now);
  const auto usable = checkpoint::newest_usable(to_go_on_from(config.output, told, start));
  if (usable.checkpoint) return usable.checkpoint->path;
  const bool goes_back = told.resume == Resume::from && is_there(told.from);
  if (!usable.damages.empty() && !goes_back)
    throw UsageError("{}, and '{}' has no older one that is whole: nothing to go on from. Put a "
                     "copy of one there, or train in a new folder (--set output=FOLDER)",
                     usable.damages.front(), checkpoints_in(config.output).string());
  check_nothing_lost(config.output, told, start);
  if (told.resume == Resume::from) return told.from;
  return std::nullopt;
}

std::string how_to_go_on(const TrainConfig& config, std::int64_t step) {
  return fmt::format(
      "the same command{} goes on from step {}",
      config.checkpoint.resume == Resume::automatic ? "" : " with --set checkpoint.resume=auto",
      step);
}

std::vector<std::string> check_resume(const TrainConfig& config, const ResolvedRun& run,
                                      const FolderHolder& now) {
  const auto from = checkpoint_to_resume(config, now);
  if (!from) return {};
  checkpoint::CheckpointReader reader(*from);
  reader.check_files();
  const checkpoint::Manifest& saved = reader.manifest();
  if (!saved.files.contains("config.json"))
    throw UsageError("the checkpoint '{}' is whole, but of another model or program: it has no "
                     "config.json of a language model. {}",
                     from->string(),
                     config.checkpoint.resume == Resume::from
                         ? "Name another in checkpoint.resume"
                         : "Choose another folder for this run: --set output=FOLDER");
  std::vector<std::string> found = differences(run.model, models::read_model_config(reader));
  const TrainConfig before = parse_config(
      saved.state.config, {.name = (*from / checkpoint::kManifestFile).string() + ", its config"});
  if (kept_by(config.optimizer) != kept_by(before.optimizer))
    found.push_back(fmt::format("optimizer.type is {}, was {}", kept_by(config.optimizer),
                                kept_by(before.optimizer)));
  if (static_cast<std::uint64_t>(config.seed) != saved.state.seed)
    found.push_back(fmt::format("seed is {}, was {}", config.seed, saved.state.seed));
  if (run.training.size() != saved.state.data.size)
    found.push_back(
        fmt::format("the training data has {} sequences, had {} (data.train, data.sequence_length, "
                    "data.validation_fraction)",
                    run.training.size(), saved.state.data.size));
  else if (const auto then = digest_in(reader); then && *then != digest(run.training.stream()))
    found.push_back("the training data has other tokens than it had (data.train)");
  if (found.empty()) {
    std::vector<std::string> changed = changed_settings(config, before);
    if (const auto begun = begun_in(saved.state.values); begun && begun->global != run.batch.global)
      changed.push_back(
          fmt::format("a step has {} samples, had {}", run.batch.global, begun->global));
    return changed;
  }
  throw UsageError("the checkpoint '{}' is of another run:\n  {}\n{}", from->string(),
                   fmt::join(found, "\n  "), way_out(config));
}

namespace {

constexpr std::int64_t kBlockTokens = 4096;
constexpr std::int64_t kMostBlocks = 256;

}  // namespace

DataDigest digest(const data::TokenStream& stream) {
  const std::int64_t size = stream.size();
  const std::int64_t num_blocks =
      std::clamp<std::int64_t>((size + kBlockTokens - 1) / kBlockTokens, 1, kMostBlocks);
  const std::int64_t last = std::max<std::int64_t>(size - kBlockTokens, 0);
  DataDigest result{.num_tokens = size};
  std::vector<std::int64_t> tokens;
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    // Divided first: the product of a large file's size and a number of blocks may not fit.
    const std::int64_t steps = std::max<std::int64_t>(num_blocks - 1, 1);
    const std::int64_t first = last / steps * block + last % steps * block / steps;
    tokens.resize(static_cast<std::size_t>(std::min(kBlockTokens, size - first)));
    stream.copy(first, tokens);
    result.crc32c = crc32c(std::as_bytes(std::span(tokens)), result.crc32c);
  }
  return result;
}

std::string to_text(const DataDigest& digest) {
  return nlohmann::ordered_json{{"num_tokens", digest.num_tokens}, {"crc32c", digest.crc32c}}.dump(
             2) +
         "\n";
}

DataDigest parse_digest(std::string_view text, const std::string& file) {
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  // Whatever else a number is, converting it would give another one, or anything.
  const auto whole_number = [&](const char* key, std::uint64_t largest) {
    const auto found = json.is_object() ? json.find(key) : json.end();
    if (found == json.end() || !found->is_number_unsigned() ||
        found->get<std::uint64_t>() > largest)
      throw UsageError(
          "'{}' does not say what a run was trained on: it must be a JSON object whose "
          "{} is a whole number from 0 to {}",
          file, key, largest);
    return found->get<std::uint64_t>();
  };
  return {.num_tokens = static_cast<std::int64_t>(
              whole_number("num_tokens", std::numeric_limits<std::int64_t>::max())),
          .crc32c = static_cast<std::uint32_t>(
              whole_number("crc32c", std::numeric_limits<std::uint32_t>::max()))};
}

}  // namespace lockstep::train
