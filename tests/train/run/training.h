// Tiny trainings by the real programs, and what they leave behind.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/launch/launched.h"

namespace lockstep::train::testing {

using launch::testing::Launched;

// One run's config, data and folder, all of which go away with it.
class Training {
 public:
  // `num_sentences` of different words, or of the same one each.
  enum class Text { random, repeated };
  explicit Training(int num_sentences = 40, Text text = Text::random);

  nlohmann::json config;

  const std::filesystem::path& folder() const { return folder_.path(); }
  std::filesystem::path output(const std::string& name = "run") const { return folder() / name; }
  std::filesystem::path text() const { return folder() / "text.txt"; }

  // A setting by its JSON pointer.
  Training& set(const std::string& pointer, const nlohmann::json& value);

  // `lockstep train` of the config as it is now, into the output of that name.
  Launched start(int num_ranks, const std::string& output = "run",
                 std::vector<std::string> more = {});

  // The same, until it ends; expects that it ends well.
  void train(int num_ranks, const std::string& output = "run", std::vector<std::string> more = {});

  // The words of that command.
  std::vector<std::string> command(const std::string& output = "run");

  // Step to loss, or to another column of metrics.csv. Expects each step once.
  std::map<int, double> losses(const std::string& output = "run") const;
  std::map<int, double> metric(const std::string& column, const std::string& output = "run") const;

  // The newest checkpoint's; empty where there is none.
  std::filesystem::path checkpoint(const std::string& output = "run") const;
  std::string weights(const std::string& output = "run") const;

 private:
  launch::testing::Folder folder_;
};

// `lockstep sample` with these arguments.
Launched sample(std::vector<std::string> arguments);

// "MASTER_PORT=…", one that nobody listens on, for ranks that the test starts itself.
std::string master_port();

// How often a text is in another.
int count(const std::string& text, const std::string& part);

}  // namespace lockstep::train::testing
