// The test program. With --job it is a program that starts itself on this host; its ranks do what
// the next word says.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include <lockstep/base/environment.h>
#include <lockstep/multi_node/multi_node_training_manager.h>

namespace {

int rank(const lockstep::DistributedManager& dist, const std::string& what) {
  const int generation = lockstep::read_launch_environment().generation;
  const double sum = dist.sum(dist.rank() + 1);
  std::printf("rank %d of %d, sum %g, generation %d\n", dist.rank(), dist.world_size(), sum,
              generation);
  std::fflush(stdout);
  if (what == "fail" && dist.rank() == 1) return 7;
  if (what == "killed once" && generation == 0 && dist.rank() == 1) ::raise(SIGKILL);
  if (what == "wait") std::this_thread::sleep_for(std::chrono::seconds(60));
  dist.barrier();
  return 0;
}

int job(int argc, char** argv) {
  try {
    lockstep::MultiNodeTrainingManager manager({.max_restarts = 1});
    manager.setup(1, 2);
    return manager.run(
        argc, argv, [&](const lockstep::DistributedManager& dist) { return rank(dist, argv[2]); });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "job: %s\n", error.what());
    return 9;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--job") == 0) return job(argc, argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
