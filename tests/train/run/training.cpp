#include "training.h"

#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/net/socket.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <random>
#include <sstream>

#include "tests/base/files.h"

namespace lockstep::train::testing {

namespace fs = std::filesystem;

namespace {

std::string sentences(int count, Training::Text kind) {
  constexpr const char* kWords[] = {"the",  "quick", "brown",  "fox",     "jumps", "over",
                                    "lazy", "dog",   "seven",  "wizards", "brew",  "strong",
                                    "old",  "blue",  "potion", "in",      "deep",  "towers"};
  std::mt19937 random(7);
  std::string text;
  for (int i = 0; i < count; ++i) {
    for (int word = 0; word < 6; ++word) {
      const auto which = kind == Training::Text::random ? random() : static_cast<unsigned>(word);
      text += kWords[which % std::size(kWords)];
      text += word == 5 ? ".\n" : " ";
    }
  }
  return text;
}

}  // namespace

Training::Training(int num_sentences, Text text) {
  folder_.write("text.txt", sentences(num_sentences, text));
  config = nlohmann::json::parse(R"({
    "model": {"family": "gpt2", "hidden_size": 16, "num_layers": 2, "num_heads": 2},
    "data": {"train": "text.txt", "sequence_length": 16},
    "train_batch_size": 8,
    "optimizer": {"params": {"lr": 3e-3}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 5}},
    "max_steps": 12,
    "steps_per_print": 1,
    "device": "cpu",
    "threads_per_rank": 1
  })");
}

Training& Training::set(const std::string& pointer, const nlohmann::json& value) {
  config[nlohmann::json::json_pointer(pointer)] = value;
  return *this;
}

std::vector<std::string> Training::command(const std::string& output) {
  folder_.write("config.json", config.dump(2));
  return {LOCKSTEP_PROGRAM, "train", (folder() / "config.json").string(), "--set",
          "output=" + this->output(output).string()};
}

Launched Training::start(int num_ranks, const std::string& output, std::vector<std::string> more) {
  std::vector<std::string> words = command(output);
  words.insert(words.end(), {"--nproc-per-node", std::to_string(num_ranks)});
  words.insert(words.end(), more.begin(), more.end());
  return Launched(std::move(words));
}

void Training::train(int num_ranks, const std::string& output, std::vector<std::string> more) {
  Launched run = start(num_ranks, output, std::move(more));
  EXPECT_EQ(run.wait(milliseconds(60'000)), 0) << run.output() << run.error();
}

std::map<int, double> Training::losses(const std::string& output) const {
  return metric("loss", output);
}

std::map<int, double> Training::metric(const std::string& column, const std::string& output) const {
  const auto cells_of = [](const std::string& line) {
    std::vector<std::string> cells;
    std::istringstream text(line);
    for (std::string cell; std::getline(text, cell, ',');) cells.push_back(cell);
    return cells;
  };
  std::map<int, double> values;
  std::ifstream file(this->output(output) / "metrics.csv");
  std::string line;
  std::getline(file, line);
  const auto columns = cells_of(line);
  const auto index = static_cast<std::size_t>(std::ranges::find(columns, column) - columns.begin());
  EXPECT_LT(index, columns.size()) << line;
  while (std::getline(file, line)) {
    const auto cells = cells_of(line);
    if (index >= cells.size() || cells[index].empty()) continue;  // a row of a validation
    EXPECT_TRUE(values.emplace(std::stoi(cells[0]), std::stod(cells[index])).second)
        << "twice: " << line;
  }
  return values;
}

fs::path Training::checkpoint(const std::string& output) const {
  fs::path newest;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(this->output(output) / "checkpoints", none))
    if (entry.path().filename().string().starts_with("step-"))
      newest = std::max(newest, entry.path());
  return newest;
}

std::string Training::weights(const std::string& output) const {
  checkpoint::CheckpointReader reader(checkpoint(output));
  std::string all;
  for (const auto& [name, record] : reader.manifest().tensors) {
    if (!name.starts_with("model/")) continue;
    const auto whole = mesh::Placement::full(record.shape);
    std::string bytes(checkpoint::piece_bytes(record.dtype, whole), '\0');
    reader.read(name, whole, std::as_writable_bytes(std::span(bytes)));
    all += name + bytes;
  }
  return all;
}

Launched sample(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {LOCKSTEP_PROGRAM, "sample"});
  return Launched(std::move(arguments), {"OMP_NUM_THREADS=1"});
}

std::string master_port() { return "MASTER_PORT=" + std::to_string(net::free_port("127.0.0.1")); }

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (auto at = text.find(part); at != text.npos; at = text.find(part, at + part.size())) ++found;
  return found;
}

}  // namespace lockstep::train::testing
