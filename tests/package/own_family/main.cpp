// Trains a model family of a program's own, from a config that names it.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include <lockstep/models/folders/hugging_face_folder.h>
#include <lockstep/models/make_model.h>
#include <lockstep/train/config/config.h>
#include <lockstep/train/train_language_model.h>

#include "token_mlp.h"

namespace fs = std::filesystem;

int main() {
  using namespace lockstep;
  models::register_family(token_mlp_family(), make_token_mlp);

  const fs::path folder = fs::temp_directory_path() / ("own_family_" + std::to_string(::getpid()));
  fs::create_directories(folder);
  std::ofstream text(folder / "text.txt");
  for (int i = 0; i < 200; ++i) text << "the alphabet is abcdefghijklmnopqrstuvwxyz. ";
  text.close();
  std::ofstream(folder / "config.json") << R"({
    "model": {"family": "token-mlp", "hidden_size": 32, "num_layers": 2, "num_heads": 2},
    "data": {"train": "text.txt", "sequence_length": 32},
    "train_batch_size": 8,
    "optimizer": {"params": {"lr": 1e-2}},
    "activation_checkpointing": {"ratio": 0.5},
    "max_steps": 60,
    "device": "cpu",
    "output": "run"
  })";
  const train::TrainConfig config = train::load_config(folder / "config.json");
  const train::TrainingResult result = train::train_language_model(config, STDOUT_FILENO, nullptr);
  const models::ModelConfig saved = models::read_model_config(result.checkpoint);
  fs::remove_all(folder);
  std::printf("a %s, %lld wide inside, loss %.3f\n", saved.family.c_str(),
              static_cast<long long>(saved.intermediate_size), result.loss);
  // Nearly every letter has only one successor. A model that has not learned that would stay near
  // the entropy of single letters, 3.2.
  return saved.family == "token-mlp" && saved.intermediate_size == 64 && result.loss < 1 ? 0 : 1;
}
