// Small models with any number of stages, which one process runs whole or several run in parts.
#pragma once

#include <map>
#include <vector>

#include <lockstep/parallel/pipeline/schedule/schedule.h>
#include <lockstep/parallel/pipeline/stage.h>

namespace lockstep::pipeline {

enum class ChainKind {
  mlp,     // widths that differ from stage to stage
  mixed,   // many tensors: doubles, integers, booleans, halves, empty ones, unused ones
  lstm,    // sequences, and states that go from stage to stage
  frozen,  // some stages train nothing, the first among them
};
inline constexpr ChainKind kChainKinds[] = {ChainKind::mlp, ChainKind::mixed, ChainKind::lstm,
                                            ChainKind::frozen};

const char* name_of(ChainKind kind);

// The parameters are the same each time.
std::vector<Stage> make_chain(ChainKind kind, int num_stages);

// The stages of one rank.
std::map<int, Stage> stages_of_rank(const std::vector<Stage>& chain, const Schedule& schedule,
                                    int rank);

// The result of a pipeline's step in one process.
struct ChainResult {
  double loss = 0;
  std::vector<std::vector<at::Tensor>> gradients;  // gradients of each stage's parameters
};

// Runs each micro-batch through all stages and back. Each stage's gradients are added to those of
// `result` in the order of its backward passes in the schedule.
void run_whole(const std::vector<Stage>& chain, const Schedule& schedule, ChainResult& result);

}  // namespace lockstep::pipeline
