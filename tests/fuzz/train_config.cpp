// Configs as people write them: the text of a file and, after each zero byte, one --set.
#include <string>

#include <lockstep/base/error.h>
#include <lockstep/train/config/batch.h>

#include "target.h"

namespace lockstep::fuzz {

namespace {

void check_batch(const train::TrainConfig& config, std::int64_t num_ranks) {
  try {
    const train::Batch batch = train::resolve_batch(config, num_ranks);
    require(batch.micro >= 1 && batch.accumulation >= 1, "a batch has samples");
    const std::int64_t most = batch.micro * batch.accumulation * num_ranks;
    require(batch.global <= most && batch.global > most - batch.micro * num_ranks,
            "the batch identity");
    require(config.batch.global.value_or(batch.global) == batch.global,
            "what was asked for is kept");
  } catch (const UsageError& error) {
    const std::string_view what = error.what();
    require(config.elasticity ||
                (config.batch.global && config.batch.micro && config.batch.accumulation),
            "with fewer than three numbers any number of ranks will do");
    require(what.starts_with(config.elasticity ? "elasticity " : "train_batch_size "),
            "it names the key");
  }
}

}  // namespace

void run(std::span<const std::byte> input) {
  std::string text(reinterpret_cast<const char*>(input.data()), input.size());
  train::ConfigSource source{.name = "fuzzed.json", .folder = "/data"};
  while (text.rfind('\0') != std::string::npos && source.overrides.size() < 4) {
    source.overrides.push_back(text.substr(text.rfind('\0') + 1));
    text.resize(text.rfind('\0'));
  }
  train::TrainConfig config;
  try {
    config = train::parse_config(text, source);
  } catch (const UsageError& error) {
    const std::string_view what = error.what();
    require(what.starts_with("fuzzed.json") || what.starts_with("--set "),
            "a message names the file or the flag");
    require(what.size() < 20000, "a message is short");
    return;
  }
  const std::string again = train::to_json(config);
  require(train::to_json(train::parse_config(again, {.name = "again.json"})) == again,
          "what is written reads the same");
  require(config.data.sequence_length >= 1 && !config.data.train.empty(), "there is data");
  require(config.max_steps || config.epochs, "training ends");
  require(config.optimizer.lr > 0, "there is a learning rate");
  for (const std::int64_t world_size : {1, 2, 3, 8, 1 << 20}) check_batch(config, world_size);
}

}  // namespace lockstep::fuzz
