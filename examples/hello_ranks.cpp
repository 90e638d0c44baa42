// The smallest program with several ranks: every rank has a tensor, and all ranks get the sum.
//
//   lockstep run --nproc-per-node 4 ./hello_ranks
//
// It runs the same under torchrun --no-python, mpirun and srun.
#include <cstdio>

#include <ATen/ATen.h>

#include <lockstep/lockstep.h>

int main() {
  try {
    const auto world = lockstep::comm::join_world();

    at::Tensor values = at::full({4}, world->rank() + 1.0, at::kFloat);
    world->all_reduce(values).wait();

    std::printf("rank %d of %d: the sum is %g\n", world->rank(), world->size(),
                values[0].item<double>());
    return 0;
  } catch (const lockstep::Error& error) {
    std::fprintf(stderr, "hello_ranks: %s\n", error.what());
    return 1;
  }
}
