#include "scenarios.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

#include <ATen/ATen.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/world.h>

namespace lockstep::comm::conformance {

namespace {

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

// One rank never makes the call that the others are in; it comes back when they have given up.
void stay_behind(Communicator& world) {
  at::Tensor tensor = at::ones({1000});
  world.all_reduce(tensor).wait();
  if (world.rank() == 1) {
    std::this_thread::sleep_for(milliseconds(1500));
    world.all_reduce(tensor).wait();
  } else {
    world.all_reduce(tensor, ReduceOp::sum, {.timeout = milliseconds(700)}).wait();
  }
}

// Calls that do not match, in a program that catches the error and asks again.
void mismatch(Communicator& world) {
  at::Tensor tensor = at::ones({1000});
  Work work = world.rank() == 0 ? world.broadcast(tensor, 1) : world.all_reduce(tensor);
  try {
    work.wait();
    world.barrier().wait();
  } catch (const CommError& error) {
    say(std::string("caught ") + error.what());
  }
  world.barrier().wait();
}

// As many elements in all, and as many for itself, but cut differently for the others.
void cut_differently(Communicator& world) {
  std::vector<at::Tensor> outputs;
  for (const std::int64_t count :
       world.rank() == 1 ? std::vector<std::int64_t>{2, 3, 4} : std::vector<std::int64_t>{3, 3, 3})
    outputs.push_back(at::empty({count}));
  world.all_gather(outputs, at::ones({3})).wait();
}

// Rank 1 gives rank 2 more than that expects.
void send_too_much(Communicator& world) {
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < world.size(); ++rank) {
    outputs.push_back(at::empty({5}));
    inputs.push_back(at::ones({world.rank() == 1 && rank == 2 ? 6 : 5}));
  }
  world.all_to_all(outputs, inputs).wait();
  world.barrier().wait();
}

// A rank dies in a call; the others say how long they took to notice.
void die(Communicator& world) {
  at::Tensor when = at::zeros({1}, at::kLong);
  if (world.rank() == 2) {
    when.fill_(std::chrono::nanoseconds(Clock::now().time_since_epoch()).count());
    world.broadcast(when, 2).wait();
    ::kill(::getpid(), SIGKILL);
  }
  world.broadcast(when, 2).wait();
  world.all_reduce(at::ones({1000})).wait();
}

}  // namespace

int run_scenario(const std::string& name) {
  // A launcher ends the others when one fails: they must get their word out before.
  ::signal(SIGTERM, SIG_IGN);
  try {
    if (name == "absent" && read_launch_environment().rank == 1) {
      std::this_thread::sleep_for(milliseconds(2500));
      return 0;
    }
    const auto world = join_world({.timeout = milliseconds(name == "absent" ? 1000 : 20'000)});
    if (name == "behind") stay_behind(*world);
    if (name == "mismatch") mismatch(*world);
    if (name == "lengths") cut_differently(*world);
    if (name == "too-much") send_too_much(*world);
    if (name == "die") die(*world);
    say("nothing happened");
    return 0;
  } catch (const Error& error) {
    say(std::string("ended by ") + error.what());
  }
  return 3;
}

}  // namespace lockstep::comm::conformance
