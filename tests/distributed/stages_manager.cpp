#include "stages_manager.h"

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

namespace lockstep {

void check_stages_manager(DistributedManager dist, ranks::Cells& cells) {
  using torch::nn::Linear;
  using torch::nn::Sequential;
  cells.cell("a whole model on each rank of a pipeline", [&] {
    cells.expect_usage_error(
        [&] { dist.wrap_model(Sequential(Linear(3, 3), Linear(3, 3))); },
        "all 2 ranks of the pipeline wrap the same parameters ('0.weight' and so on)");
  });
  cells.cell("a name that two stages have for different layers", [&] {
    Sequential mine;
    torch::manual_seed(static_cast<std::uint64_t>(dist.rank()));
    mine->push_back("fc", Linear(3, 3));
    mine->push_back(dist.rank() == 0 ? "first" : "second", Linear(3, 3));
    cells.expect_usage_error([&] { dist.wrap_model(mine); },
                             "both have a parameter 'fc.weight', with different values");
  });
  cells.cell("a layer that two stages share", [&] {
    Sequential mine;
    torch::manual_seed(1);
    mine->push_back("fc", Linear(3, 3));
    mine->push_back(dist.rank() == 0 ? "first" : "second", Linear(3, 3));
    dist.wrap_model(mine);
    const auto state = dist.full_state_dict(mine);
    cells.expect(!dist.is_main() || state.size() == 6, "not each parameter once");
  });
  cells.cell("its stages", [&] {
    Sequential mine;
    mine->push_back(dist.rank() == 0 ? "first" : "second", Linear(3, 3));
    dist.wrap_model(mine);
    cells.expect(dist.is_wrapped(mine), "not wrapped");
  });
}

}  // namespace lockstep
