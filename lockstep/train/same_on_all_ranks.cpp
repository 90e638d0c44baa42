#include <lockstep/train/same_on_all_ranks.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/distributed/told_the_same.h>
#include <lockstep/models/spec/hugging_face.h>
#include <lockstep/parallel/pipeline/schedule/schedule_file.h>
#include <lockstep/train/data_digest.h>

namespace lockstep::train {

namespace {

// Where files lie may differ from host to host, and so may how a rank loads and prints.
bool is_for_a_host(const std::string& key) {
  static constexpr std::array kBeginnings = {
      "data.train",       "data.validation.",       "data.num_workers",  "data.prefetch",
      "model.from",       "parallel.schedule_file", "checkpoint.resume", "output",
      "tensorboard.",     "csv_monitor.",           "steps_per_print",   "device",
      "threads_per_rank", "timeout_seconds",
  };
  return key.ends_with("nvme_path") ||
         std::ranges::any_of(kBeginnings, [&](const char* one) { return key.starts_with(one); });
}

// The leaves of a JSON text, as "model.hidden_size is 8".
void add_lines(const std::string& json, const std::string& prefix,
               std::vector<std::string>& lines) {
  const auto values = nlohmann::ordered_json::parse(json).flatten();
  for (const auto& [path, value] : values.items()) {
    std::string key = prefix + path.substr(1);
    std::ranges::replace(key, '/', '.');
    if (!is_for_a_host(key)) lines.push_back(fmt::format("{} is {}", key, value.dump()));
  }
}

std::string text_of(const char* what, const data::TokenStream& stream) {
  const DataDigest all = digest(stream);
  return fmt::format("the {} data has {} tokens with a checksum of {:08x}", what, all.num_tokens,
                     all.crc32c);
}

}  // namespace

void check_same_config(const TrainConfig& config, const RankMessages& ranks) {
  std::vector<std::string> lines;
  add_lines(to_json(config), "", lines);
  check_told_the_same(lines, ranks);
}

void check_same_files(const RunPlan& plan, const RankMessages& ranks) {
  std::vector<std::string> lines;
  add_lines(models::to_hugging_face(plan.model), "the model's ", lines);
  if (plan.pipeline)
    add_lines(pipeline::to_text(plan.pipeline->schedule), "the schedule's ", lines);
  lines.push_back(text_of("training", plan.training.stream()));
  if (plan.validation) lines.push_back(text_of("validation", plan.validation->stream()));
  check_told_the_same(lines, ranks);
}

}  // namespace lockstep::train
