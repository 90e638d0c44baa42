#include <lockstep/parallel/pipeline/sequential_parts.h>

#include <string>

namespace lockstep::pipeline {

torch::nn::Sequential children_of(const torch::nn::Sequential& model, int begin, int end) {
  torch::nn::Sequential part;
  const auto children = model->named_children();
  auto child = model->begin() + begin;
  for (int index = begin; index < end; ++index, ++child)
    part->push_back(children[static_cast<std::size_t>(index)].key(), *child);
  return part;
}

SequentialParts split_sequential(const torch::nn::Sequential& model,
                                 const std::vector<int>& rank_of_stage, comm::Communicator& group,
                                 const SequentialCut& cut) {
  std::string fault;
  if (cut.cuts.empty() && cut.balance == Balance::time && !cut.sample.defined())
    fault = "stages are to be balanced by time, and there is no sample to measure it with: set "
            "SequentialCut::sample to the input of a micro-batch";
  CutBlocks made = cut_blocks({.model = *model,
                               .blocks = blocks_of(model),
                               .sample = [&] { return std::vector<at::Tensor>{cut.sample}; },
                               .rank_of_stage = rank_of_stage,
                               .cut = {.balance = cut.balance, .cuts = cut.cuts},
                               .fault = fault},
                              group);
  SequentialParts parts{.mine = {}, .cuts = made.cuts, .tied = std::move(made.tied)};
  for (std::size_t stage = 0; stage < rank_of_stage.size(); ++stage)
    if (rank_of_stage[stage] == group.rank())
      parts.mine.emplace(stage, children_of(model, made.cuts[stage], made.cuts[stage + 1]));
  return parts;
}

}  // namespace lockstep::pipeline
