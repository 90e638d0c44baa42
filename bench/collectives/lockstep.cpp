// Measures our own communicator. Arguments: the largest size in MiB, the backend, the name to
// report, and "allocated" for buffers that the backend reaches without a copy. Run under `lockstep
// run`.
#include <cstring>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <lockstep/comm/world/join.h>

#include "measure.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  const auto sizes = bench::sizes_up_to(argc > 1 ? argv[1] : nullptr);
  const std::string backend = argc > 2 ? argv[2] : "auto";
  const std::string who = argc > 3 ? argv[3] : "lockstep";
  const bool allocated = argc > 4 && std::strcmp(argv[4], "allocated") == 0;
  at::set_num_threads(1);
  const auto world = comm::join_world({.backend = backend});
  const comm::CallOptions now{.launch = comm::Launch::on_wait};
  const auto tensor = [&](std::int64_t count) {
    at::Tensor made =
        allocated ? world->allocate({count}, at::kFloat) : at::empty({count}, at::kFloat);
    return made.zero_();
  };
  const auto measure = [&](const char* operation, std::size_t bytes, auto call) {
    world->barrier(now).wait();
    const double time = bench::median_microseconds(bytes, call);
    if (world->rank() == 0) bench::report(who, operation, world->size(), bytes, time);
  };
  for (const std::size_t bytes : sizes) {
    const auto part = static_cast<std::int64_t>(bytes / 4) / world->size();
    at::Tensor whole = tensor(part * world->size());
    at::Tensor own = tensor(part);
    measure("all_reduce", bytes,
            [&] { world->all_reduce(whole, comm::ReduceOp::sum, now).wait(); });
    if (allocated) continue;
    measure("all_gather", bytes, [&] { world->all_gather(whole, own, now).wait(); });
    measure("reduce_scatter", bytes,
            [&] { world->reduce_scatter(own, whole, comm::ReduceOp::sum, now).wait(); });
  }
  if (world->rank() == 0 && allocated) {
    for (const std::size_t bytes : sizes) {
      std::vector<char> from(bytes, 1);
      std::vector<char> to(bytes);
      const double time = bench::median_microseconds(bytes, [&] {
        std::memcpy(to.data(), from.data(), bytes);
        asm volatile("" : : "r"(to.data()) : "memory");
      });
      bench::report("memcpy", "all_reduce", world->size(), bytes, time);
    }
  }
  world->barrier().wait();
}
