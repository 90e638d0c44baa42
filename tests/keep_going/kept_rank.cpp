// A rank in keep_going(). In each generation it prints who it is. In the first it then waits for
// others in the way that its argument names, and rank 2 is lost, or stopped. With a second argument
// the process that takes its place is lost, too: with "early" before it has reached the others,
// with "late" in its first call with them. With "joining" as the first argument nobody is lost: in
// the first generation, rank 1 has a lot to load before it says that it stays.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include <ATen/ATen.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/recovery/keep_going.h>

namespace lockstep {
namespace {

using Group = std::shared_ptr<comm::Communicator>;

constexpr int kLost = 2;

void be_lost() { ::kill(::getpid(), SIGKILL); }

double sum_of(const Group& group) {
  at::Tensor one = at::ones({1}, at::kDouble);
  group->all_reduce(one).wait_on_host();
  return one.item<double>();
}

// All ranks are in calls that the lost rank is in.
void wait_for_the_lost(const Group& world) {
  if (world->rank() == kLost) be_lost();
  sum_of(world);
}

// Ranks 0 and 1 do not communicate with the lost rank, and notice nothing by themselves.
void go_on_without_the_lost(const Group& world) {
  const auto pair = world->split(world->rank() / 2, world->rank(), "pair");
  if (world->rank() == kLost) be_lost();
  while (true) sum_of(pair);
}

// The ranks are in no call when it happens.
void compute(const Group& world) {
  if (world->rank() == kLost) be_lost();
  if (world->rank() == 0) std::this_thread::sleep_for(milliseconds(700));
  sum_of(world);
}

Clock::time_point failed_at;

// Nobody is lost: a rank is stopped for longer than the others' deadline.
void wait_for_the_stopped(const Group& world) {
  if (world->rank() == kLost) ::kill(::getpid(), SIGSTOP);
  try {
    world->barrier({.timeout = milliseconds(1000)}).wait_on_host();
  } catch (const CommError&) {
    failed_at = Clock::now();
    throw;
  }
}

// Nobody is lost: all ranks are stopped for longer than the deadline of those that wait for rank 1,
// which comes once it has been stopped.
void wait_while_all_are_stopped(const Group& world) {
  using Steady = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto steady = Steady::now();
  std::printf("rank %d has begun \n", world->rank());
  std::fflush(stdout);
  const auto stopped_for = [&] { return (Steady::now() - steady) - (Clock::now() - begin); };
  while (world->rank() == 1 && stopped_for() < milliseconds(1000))
    std::this_thread::sleep_for(milliseconds(10));
  world->barrier({.timeout = milliseconds(6000)}).wait_on_host();
}

// A rank throws an exception that has nothing to do with others: it has failed by itself.
void fail_by_itself(const Group& world) {
  if (world->rank() == kLost) throw std::runtime_error("out of ideas");
  sum_of(world);
}

// The program throws an exception of its own for a call that failed.
void wrap_what_is_thrown(const Group& world) {
  try {
    wait_for_the_lost(world);
  } catch (const CommError& error) {
    std::this_thread::sleep_for(milliseconds(1000));  // the launcher has told this rank by then
    throw std::runtime_error(std::string("my own words: ") + error.what());
  }
}

const std::map<std::string, std::function<void(const Group&)>>& ways() {
  static const std::map<std::string, std::function<void(const Group&)>> all = {
      {"waiting", wait_for_the_lost},
      {"apart", go_on_without_the_lost},
      {"computing", compute},
      {"failing", fail_by_itself},
      {"wrapping", wrap_what_is_thrown},
      {"stopped", wait_for_the_stopped},
      {"paused", wait_while_all_are_stopped},
  };
  return all;
}

void body(const std::string& way, const std::string& again) {
  const LaunchEnvironment env = read_launch_environment();
  const bool lost_again = env.generation == 1 && env.rank == kLost;
  if (lost_again && again == "early") {
    std::this_thread::sleep_for(milliseconds(300));  // the others have arrived by then
    be_lost();
  }
  std::printf("process %d joins generation %d \n", ::getpid(), env.generation);
  std::fflush(stdout);
  const auto dist =
      setup_distributed({.timeout = milliseconds(60'000), .device_type = c10::DeviceType::CPU});
  std::printf("pid=%d rank=%d world=%d generation=%d \n", ::getpid(), dist.rank(),
              dist.world_size(), env.generation);
  std::fflush(stdout);
  if (env.generation == 0 && !way.empty()) ways().at(way)(dist.world());
  if (lost_again && again == "late") be_lost();
  const double sum = sum_of(dist.world());
  std::printf("the sum is %g \n", sum);
}

void load_a_lot() {
  const LaunchEnvironment env = read_launch_environment();
  if (env.generation == 0 && env.rank == 1) std::this_thread::sleep_for(milliseconds(60'000));
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  const std::string way = argc > 1 ? argv[1] : "";
  try {
    if (way == "joining") lockstep::load_a_lot();
    lockstep::keep_going([&] { lockstep::body(way, argc > 2 ? argv[2] : ""); });
    return 0;
  } catch (const std::exception& error) {
    const std::chrono::duration<double> since = lockstep::Clock::now() - lockstep::failed_at;
    std::fprintf(stderr, "gave up after %.3f s: %s\n", since.count(), error.what());
    return 1;
  }
}
