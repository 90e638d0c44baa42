// What the engine is compared on: models, layouts of the ranks, and the loop of one process that is
// written by hand.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>
#include <nlohmann/json.hpp>

#include <lockstep/distributed/distributed.h>
#include <lockstep/train/engine.h>
#include <tests/ranks/cells.h>

#include "plain_models.h"

namespace lockstep {

struct Subject {
  std::string name;
  std::function<std::shared_ptr<plain::Net>()> make;
  std::int64_t num_samples = 41;
  std::int64_t batch = 12;
  std::int64_t micro = 2;  // 0: the whole share of a rank
  bool has_batch_norm = false;
  nlohmann::json tensor_plan = {};  // over two ranks
};

template <typename Model>
std::shared_ptr<plain::Net> make() {
  return std::make_shared<Model>();
}

inline constexpr std::uint64_t kSeed = 7;

std::vector<Subject> subjects();

struct Layout {
  std::string name;
  nlohmann::json keys = nlohmann::json::object();
  int num_axes = 1;  // of more than one rank each
  int data = 1;      // ranks that have samples of their own
};

// Those in which every rank has all layers, and those that cut the model into stages.
std::vector<Layout> layouts(const Subject& subject, int num_ranks);
std::vector<Layout> pipelines(const Subject& subject, int num_ranks);

EngineConfig config_of(const Subject& subject, const Layout& layout);

// Plain LibTorch: whole batches, one process.
std::vector<NamedTensor> train_alone(const Subject& subject, std::int64_t epochs);

template <typename AnEngine>
void train_epochs(AnEngine& engine, const Subject& subject, std::int64_t until) {
  const auto points = std::make_shared<plain::Points>(subject.num_samples);
  if (engine.dist().config().model_parallel.pipeline > 1) {
    const auto batches = engine.loader(points);
    while (engine.epoch() < until) engine.train_batch(batches, plain::mean_loss);
    return;
  }
  while (engine.epoch() < until)
    for (const auto& batch : engine.loader(points)) {
      const at::Tensor loss = plain::mean_loss(engine.forward(batch.data), batch.target);
      engine.backward(loss);
      engine.step();
    }
}

// Compares on the main rank. `got` is what full_state_dict() gives.
void expect_same_state(ranks::Cells& cells, const std::vector<NamedTensor>& got,
                       const std::vector<NamedTensor>& wanted, double tolerance);

template <typename AnEngine>
void expect_state(ranks::Cells& cells, AnEngine& engine, const std::vector<NamedTensor>& wanted,
                  double tolerance) {
  const std::vector<NamedTensor> got = engine.dist().full_state_dict(engine.model());
  if (engine.dist().is_main()) expect_same_state(cells, got, wanted, tolerance);
}

void set_default_type(c10::ScalarType type);

}  // namespace lockstep
