// Small models in any number of stages, to be run whole by one process or in parts by several.
#pragma once

#include <map>
#include <vector>

#include <lockstep/parallel/pipeline/schedule/schedule.h>
#include <lockstep/parallel/pipeline/stage.h>

namespace lockstep::pipeline {

enum class ChainKind {
  mlp,     // widths that differ from stage to stage
  mixed,   // many tensors: doubles, integers, booleans, halves, none at all, unused ones
  lstm,    // sequences, and states that go from stage to stage
  frozen,  // stages that train nothing, the first of them
};
inline constexpr ChainKind kChainKinds[] = {ChainKind::mlp, ChainKind::mixed, ChainKind::lstm,
                                            ChainKind::frozen};

const char* name_of(ChainKind kind);

// The same parameters each time.
std::vector<Stage> make_chain(ChainKind kind, int num_stages);

// Each rank's own of them.
std::map<int, Stage> stages_of_rank(const std::vector<Stage>& chain, const Schedule& schedule,
                                    int rank);

// What one process has after a step of a pipeline.
struct ChainResult {
  double loss = 0;
  std::vector<std::vector<at::Tensor>> gradients;  // of each stage's parameters
};

// Each micro-batch through all stages and back. Gradients are added to those of `result` for each
// stage in the order in which the schedule has its backward passes.
void run_whole(const std::vector<Stage>& chain, const Schedule& schedule, ChainResult& result);

}  // namespace lockstep::pipeline
