// Configs for tests: the smallest valid one, and changes to it.
#pragma once

#include <initializer_list>
#include <string>

#include <nlohmann/json.hpp>

#include <lockstep/train/config/config.h>
#include "tests/base/errors.h"

namespace lockstep::train {

inline nlohmann::json least() {
  return nlohmann::json::parse(R"({
    "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 4},
    "data": {"train": "input.txt", "sequence_length": 32},
    "train_batch_size": 8,
    "optimizer": {"params": {"lr": 1e-3}},
    "max_steps": 10
  })");
}

// A change to the smallest valid config: a value at a JSON pointer.
struct Change {
  const char* pointer;
  nlohmann::json value;
};

inline std::string text_with(std::initializer_list<Change> changes) {
  nlohmann::json config = least();
  for (const Change& change : changes)
    config[nlohmann::json::json_pointer(change.pointer)] = change.value;
  return config.dump();
}

inline ConfigDraft draft_with(std::initializer_list<Change> changes) {
  return draft_config(text_with(changes), {.name = "gpt.json", .folder = "/data"});
}

inline TrainConfig config_with(std::initializer_list<Change> changes) {
  return parse_config(text_with(changes), {.name = "gpt.json", .folder = "/data"});
}

inline std::string mistake_with(std::initializer_list<Change> changes) {
  return usage_error([&] { config_with(changes); });
}

}  // namespace lockstep::train
