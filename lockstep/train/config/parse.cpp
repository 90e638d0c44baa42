#include <lockstep/base/error.h>
#include <lockstep/base/mapped_file.h>
#include <lockstep/train/config/batch.h>
#include <lockstep/train/config/sections.h>

namespace lockstep::train {

namespace {

void check_batch(JsonReader& reader, JsonSection& top, const BatchSection& batch) {
  for (const std::string_view key : {"train_batch_size", "train_micro_batch_size_per_gpu",
                                     "gradient_accumulation_steps", "elasticity"})
    if (top.has_mistake(key)) return;
  if (!batch.global && !batch.micro)
    top.missing(
        "train_batch_size",
        "set it to the samples of a step on all ranks, or train_micro_batch_size_per_gpu to "
        "those of one forward pass on one rank, or both");
  else if (const std::string wrong = batch_contradiction(batch); !wrong.empty())
    reader.mistake_about("train_batch_size", wrong);
}

TrainConfig read_config(std::string_view text, const ConfigSource& source, NamedFiles files) {
  JsonNode root = parse_json(text, source.name);
  for (const std::string& assignment : source.overrides) apply_override(root, assignment);
  JsonReader reader(root, source.name);
  const PathReader paths(reader, source);
  JsonSection top = reader.top();
  TrainConfig config;
  read_run(top, paths, source, config);
  read_data(top, paths, config.data);
  read_model(top, paths, config.data, config.model);
  read_batch(top, config.batch);
  read_optimizer(top, config.optimizer);
  read_scheduler(top, config);
  read_parallel(top, paths, config.parallel);
  read_elasticity(top, config.parallel, config);
  read_sharding(top, config.sharding);
  read_precision(top, config.sharding.strategy, config.precision);
  read_recompute(top, config.recomputed_blocks);
  read_foreign(top);
  if (!config.elasticity) check_batch(reader, top, config.batch);
  if (files != NamedFiles::unknown) check_files(reader, config, files);
  reader.finish();
  return config;
}

}  // namespace

TrainConfig parse_config(std::string_view text, const ConfigSource& source) {
  return read_config(text, source, NamedFiles::unknown);
}

TrainConfig load_config(const std::filesystem::path& path,
                        const std::vector<std::string>& overrides, NamedFiles files) {
  std::error_code unknown;
  const auto kind = std::filesystem::status(path, unknown).type();
  using Kind = std::filesystem::file_type;
  if (kind != Kind::regular && kind != Kind::not_found && !unknown)
    throw UsageError("'{}' is {}, and a config file is wanted: a JSON file as docs/config.md "
                     "explains it",
                     path.string(), kind == Kind::directory ? "a folder" : "no plain file");
  const MappedFile file(path);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.size());
  return read_config(
      text, {.name = path.string(), .folder = path.parent_path(), .overrides = overrides}, files);
}

}  // namespace lockstep::train
