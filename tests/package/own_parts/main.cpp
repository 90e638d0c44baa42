// Follows the recipes "to add a backend", "a pipeline schedule" and "a token format" of
// ARCHITECTURE.md from outside the tree, and trains a language model with all three from a config,
// as two ranks that `lockstep run` starts.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/comm/world/backends.h>
#include <lockstep/data/tokens/token_format.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/train/config/config.h>
#include <lockstep/train/train_language_model.h>

namespace {

namespace fs = std::filesystem;
using namespace lockstep;

// The groups that this rank talks in, over TCP.
int num_groups = 0;

std::shared_ptr<comm::Communicator> make_counted(const comm::GroupInfo& group,
                                                 const comm::GroupOptions& options) {
  ++num_groups;
  return comm::make_group("tcp", group, options);
}

// All forwards, then the backwards from the last micro-batch to the first.
pipeline::Order last_in_first_out(const pipeline::ScheduleSize& size) {
  pipeline::Order order(static_cast<std::size_t>(size.num_ranks));
  for (int rank = 0; rank < size.num_ranks; ++rank) {
    auto& actions = order[static_cast<std::size_t>(rank)];
    for (int i = 0; i < size.num_micro_batches; ++i)
      actions.push_back({pipeline::ActionKind::forward, rank, i});
    for (int i = size.num_micro_batches; i-- > 0;)
      actions.push_back({pipeline::ActionKind::backward, rank, i});
  }
  return order;
}

// Four letters, then a byte for each token.
constexpr char kMagic[] = {'D', 'I', 'G', 'S'};

bool is_digits(const fs::path& path) {
  char begin[sizeof kMagic] = {};
  std::ifstream(path, std::ios::binary).read(begin, sizeof begin);
  return std::memcmp(begin, kMagic, sizeof kMagic) == 0;
}

data::TokenLayout digits_layout(std::span<const data::TokenBytes> files) {
  data::check_not_empty(files.front());
  const std::int64_t count = std::ssize(files.front().bytes) - std::ssize(kMagic);
  if (!is_digits(files.front().path) || count <= 0)
    throw UsageError("token file '{}' does not begin with DIGS and a token after that",
                     files.front().path.string());
  return {data::TokenType::u8, sizeof kMagic, count};
}

constexpr const char* kConfig = R"({
  "model": {"family": "gpt2", "hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 10},
  "data": {"train": "digits.bin", "format": "digits", "sequence_length": 16},
  "output": "run",
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 4,
  "max_steps": 60,
  "device": "cpu",
  "optimizer": {"params": {"lr": 1e-2}},
  "parallel": {"pipeline": 2, "schedule": "lifo"},
  "communication": {"backend": "counted"}
})";

int train_as_a_rank() {
  comm::register_backend({.can = {.name = "counted",
                                  .title = "groups that are counted",
                                  .sums = comm::backends::Sums::canonical,
                                  .inside_a_host = "tcp",
                                  .between_hosts = "tcp"},
                          .make = make_counted});
  pipeline::register_schedule({.name = "lifo", .order = last_in_first_out});
  data::add_token_format({.name = "digits", .recognises = is_digits, .layout = digits_layout});

  const train::TrainConfig config = train::load_config("config.json");
  const train::TrainingResult result =
      train::train_language_model(config, /*output_fd=*/1, nullptr);
  std::printf("after step %ld the loss is %g, in %d groups\n", static_cast<long>(result.step),
              result.loss, num_groups);
  // Each digit follows from the one before; one that could be any has a loss of 2.3.
  return result.step == 60 && result.loss < 1 && num_groups > 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) return train_as_a_rank();
  fs::remove_all("run");
  std::ofstream tokens("digits.bin", std::ios::binary);
  tokens.write(kMagic, sizeof kMagic);
  for (int i = 0; i < 4000; ++i) tokens.put(static_cast<char>(i % 10));
  tokens.close();
  std::ofstream("config.json") << kConfig;
  const std::string command = std::string(LOCKSTEP_PROGRAM) + " run --nproc-per-node 2 " +
                              fs::canonical("/proc/self/exe").string() + " train";
  return std::system(command.c_str()) == 0 ? 0 : 1;
}
