// Tiny trainings run by the real programs, and the files that they leave.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/launch/launched.h"

namespace lockstep::train::testing {

using launch::testing::Launched;

// One run's config, data and folder, all of which are removed with it.
class Training {
 public:
  // The text has `num_sentences` sentences with different words, or one sentence repeated.
  enum class Text { random, repeated };
  explicit Training(int num_sentences = 40, Text text = Text::random);

  nlohmann::json config;

  const std::filesystem::path& folder() const { return folder_.path(); }
  std::filesystem::path output(const std::string& name = "run") const { return folder() / name; }
  std::filesystem::path text() const { return folder() / "text.txt"; }

  // Changes a setting by its JSON pointer.
  Training& set(const std::string& pointer, const nlohmann::json& value);

  // Starts `lockstep train` with the config as it is now and the output of that name.
  Launched start(int num_ranks, const std::string& output = "run",
                 std::vector<std::string> more = {});

  // Does the same, waits for the end and expects that it ends well.
  void train(int num_ranks, const std::string& output = "run", std::vector<std::string> more = {});

  // The words of that command line.
  std::vector<std::string> command(const std::string& output = "run");

  // By step, the loss or another column of metrics.csv. Expects each step once.
  std::map<int, double> losses(const std::string& output = "run") const;
  std::map<int, double> metric(const std::string& column, const std::string& output = "run") const;

  // The newest checkpoint, and its weights; empty if there is none.
  std::filesystem::path checkpoint(const std::string& output = "run") const;
  std::string weights(const std::string& output = "run") const;

 private:
  launch::testing::Folder folder_;
};

// Runs `lockstep sample` with these arguments.
Launched sample(std::vector<std::string> arguments);

// "MASTER_PORT=…" with a port on which nobody listens, for ranks that the test starts itself.
std::string master_port();

// How often `part` occurs in `text`.
int count(const std::string& text, const std::string& part);

}  // namespace lockstep::train::testing
