// Measures the cost of a call before any byte moves: argument checks, numbering, fingerprint,
// flight recorder, executor. A world of one has nothing to move, so its calls do nothing else.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <lockstep/comm/world/join.h>

#include "measure.h"

int main() {
  using namespace lockstep;
  at::set_num_threads(1);
  const auto world = comm::join_world();
  at::Tensor tensor = at::zeros({262144}, at::kFloat);
  const comm::CallOptions now{.launch = comm::Launch::on_wait};
  const double time = bench::median_microseconds(
      1 << 18, [&] { world->all_reduce(tensor, comm::ReduceOp::sum, now).wait(); });
  bench::report("overhead", "all_reduce", 1, 1 << 20, time);
}
