#include "scenarios.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/world/join.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/flight/journal.h>
#include <lockstep/observe/slow_ranks.h>
#include <lockstep/recovery/keep_going.h>

#include "../../ranks/gpu_sharing.h"
#include "own_backend.h"

namespace lockstep::comm::conformance {

namespace {

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

// One rank never makes the call that the others are in; it returns when they have given up.
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

// The calls do not match, in a program that catches the error and calls again.
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

// All ranks pass equally many elements in all and for themselves, but cut the others' parts
// differently.
void cut_differently(Communicator& world) {
  std::vector<at::Tensor> outputs;
  for (const std::int64_t count :
       world.rank() == 1 ? std::vector<std::int64_t>{2, 3, 4} : std::vector<std::int64_t>{3, 3, 3})
    outputs.push_back(at::empty({count}));
  world.all_gather(outputs, at::ones({3})).wait();
}

// Rank 1 sends rank 2 more than rank 2 expects.
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

// A rank dies while the others call.
void die(Communicator& world) {
  world.barrier().wait();
  if (world.rank() == 2) ::kill(::getpid(), SIGKILL);
  world.all_reduce(at::ones({1000})).wait();
}

// Two pairs of ranks share layers, and a pipeline of two stages connects the pairs. A rank that
// computes for too long holds up its partner, which holds up the stage before it.
struct Grid {
  explicit Grid(Communicator& world)
      : tp(world.split(world.rank() / 2, world.rank(), "tp")),
        pp(world.split(world.rank() % 2, world.rank(), "pp")) {}

  std::shared_ptr<Communicator> tp;  // ranks 0 and 1, 2 and 3
  std::shared_ptr<Communicator> pp;  // ranks 0 and 2, 1 and 3
};

void hold_up_a_chain(Communicator& world, milliseconds patience) {
  const Grid grid(world);
  at::Tensor tensor = at::ones({1000});
  world.journal().note_progress(7, "forward");
  world.barrier().wait();
  if (world.rank() == 3) {
    say("computing");
    std::this_thread::sleep_for(std::chrono::minutes(5));
  } else if (world.rank() == 2) {
    grid.tp->all_reduce(tensor, ReduceOp::sum, {.timeout = patience}).wait();
  } else {
    grid.pp->exchange({receive_from(1, tensor)}).wait();
  }
}

// A rank that is stopped in its own code.
void stop(Communicator& world) {
  world.barrier().wait();
  if (world.rank() == 1) ::kill(::getpid(), SIGSTOP);
  world.all_reduce(at::ones({1000}), ReduceOp::sum, {.timeout = milliseconds(1000)}).wait();
}

// In these steps rank 1's own part takes twice as long; waiting for it makes the steps equally long
// on all ranks.
void train_with_a_slow_rank(Communicator& world) {
  observe::SlowRanks slow({0, 1, 2});
  const at::Tensor gradient = at::ones({1000});
  const at::Tensor all = at::empty({world.size()}, at::kDouble);
  for (std::uint64_t step = 0; step < 20; ++step) {
    const auto begin = Clock::now();
    const double waited = world.journal().waited_seconds();
    std::this_thread::sleep_for(milliseconds(world.rank() == 1 ? 120 : 60));
    world.all_reduce(gradient).wait();
    const double own = std::chrono::duration<double>(Clock::now() - begin).count() -
                       (world.journal().waited_seconds() - waited);
    world.all_gather(all, at::full({1}, own, at::kDouble), {.launch = Launch::on_wait}).wait();
    const auto* seconds = all.data_ptr<double>();
    for (const auto& news : slow.step(step, {seconds, static_cast<std::size_t>(world.size())}))
      say(news.text());
  }
}

// One rank throws an exception of its own while the others wait.
void throw_alone(Communicator& world) {
  world.barrier().wait();
  if (world.rank() == 2) throw UsageError("a mistake of one rank");
  world.all_reduce(at::ones({1000})).wait();
}

// There are three pairs, and each rank waits in another pair: first for a rank that is only slow,
// with a call of every pair in flight, then forever.
void wait_in_a_circle(Communicator& world) {
  std::vector<std::shared_ptr<Communicator>> pairs;  // {0, 1}, {1, 2}, {2, 0}
  for (int first = 0; first < 3; ++first) {
    const bool in = world.rank() == first || world.rank() == (first + 1) % 3;
    pairs.push_back(world.split(in ? 0 : -1, world.rank(), fmt::format("pair {}", first)));
  }
  const int mine = world.rank();
  const int other = (world.rank() + 2) % 3;
  at::Tensor one = at::ones({1000});
  at::Tensor two = at::ones({1000});
  Work last = pairs[static_cast<std::size_t>(other)]->all_reduce(one);
  if (world.rank() == 1) std::this_thread::sleep_for(milliseconds(2000));
  pairs[static_cast<std::size_t>(mine)]->all_reduce(two).wait();
  last.wait();
  say("in step");
  pairs[static_cast<std::size_t>(mine)]->all_reduce(two).wait();
}

// Rank 1 waits for rank 0 in one group, and rank 0 for rank 2 in another, which has ended.
void end_early(Communicator& world) {
  const auto apart = world.split(world.rank() == 1 ? 1 : 0, world.rank(), "apart");
  world.barrier().wait();
  if (world.rank() == 2) return;
  (world.rank() == 0 ? *apart : world).barrier().wait();
}

// One rank aborts the group while the others wait.
void call_off(Communicator& world) {
  world.barrier().wait();
  if (world.rank() == 2) {
    std::this_thread::sleep_for(milliseconds(100));
    world.abort("the loss is not a number");
  }
  world.all_reduce(at::ones({1000})).wait();
}

const c10::Device kGpu(c10::kCUDA, 0);

std::shared_ptr<Communicator> join_over_nccl() {
  ranks::be_a_host_for_nccl(ranks::GpuSharing::in_turns);
  c10::impl::VirtualGuardImpl(kGpu.type()).setDevice(kGpu);
  return join_world({.backend = "nccl", .device = kGpu, .timeout = milliseconds(60'000)});
}

// Rank 1 is lost in the first generation while rank 0 waits for it.
void go_on_over_nccl() {
  const int generation = read_launch_environment().generation;
  const auto world = join_over_nccl();
  const at::Tensor ones = at::ones({1000}, at::device(kGpu));
  world->all_reduce(ones).wait();
  say(fmt::format("process {} generation {} sum {}", ::getpid(), generation,
                  ones[0].item<double>()));
  if (generation == 0 && world->rank() == 1) ::kill(::getpid(), SIGKILL);
  world->all_reduce(ones).wait_on_host();
}

// Two ranks whose tensors travel by NCCL, on one GPU. `fault` is what rank 1 does instead of the
// sum that rank 0 makes.
void fail_over_nccl(const std::string& fault) {
  const auto world = join_over_nccl();
  const at::Tensor tensor = at::ones({1000}, at::device(kGpu));
  const auto sum = [&](const at::Tensor& numbers) {
    world->all_reduce(numbers, ReduceOp::sum, {.timeout = milliseconds(4000)}).wait_on_host();
  };
  sum(tensor);
  say(fmt::format("over {}", world->backend()));
  world->barrier().wait();
  if (fault == "exchange") {
    if (world->rank() == 1) std::this_thread::sleep_for(milliseconds(8000));
    const Transfer transfer = world->rank() == 0 ? receive_from(1, tensor) : send_to(0, tensor);
    return world->exchange({transfer}, {.timeout = milliseconds(4000)}).wait_on_host();
  }
  if (fault == "parts") {
    // Rank 1 sends one number fewer than rank 0 expects.
    const auto part = [&](int numbers) { return at::ones({numbers}, at::device(kGpu)); };
    const int expected = 5, sent = world->rank() == 1 ? 4 : 5;
    world
        ->all_to_all({part(expected), part(expected)}, {part(sent), part(expected)},
                     {.timeout = milliseconds(4000)})
        .wait_on_host();
    std::this_thread::sleep_for(milliseconds(500));
    return sum(tensor);
  }
  if (world->rank() == 0) {
    if (fault == "abort") std::this_thread::sleep_for(milliseconds(300));
    if (fault == "abort") world->abort("the loss is not a number");
    sum(tensor);
    // A mismatch is found beside the call, so the next call throws it at the latest.
    std::this_thread::sleep_for(milliseconds(500));
    return sum(tensor);
  }
  if (fault == "die") ::kill(::getpid(), SIGKILL);
  if (fault == "stop") ::kill(::getpid(), SIGSTOP);
  if (fault == "behind") std::this_thread::sleep_for(milliseconds(8000));
  if (fault == "operation")
    world->broadcast(tensor, 1, {.timeout = milliseconds(4000)}).wait_on_host();
  else if (fault == "size")
    sum(at::ones({2000}, at::device(kGpu)));
  else if (fault == "place")
    sum(at::ones({1000}));
  else if (fault == "dtype")
    sum(at::ones({1000}, at::device(kGpu).dtype(at::kDouble)));
  else
    sum(tensor);
  std::this_thread::sleep_for(milliseconds(500));
  sum(tensor);
}

}  // namespace

int run_scenario(const std::string& name) {
  // A launcher ends the other ranks when one fails; ignoring SIGTERM lets them print their messages
  // first.
  if (!name.starts_with("chain")) ::signal(SIGTERM, SIG_IGN);
  try {
    if (name == "absent" && read_launch_environment().rank == 1) {
      std::this_thread::sleep_for(milliseconds(2500));
      return 0;
    }
    if (name.starts_with("circle-")) {
      const std::string backend = name.substr(name.find('-') + 1);
      wait_in_a_circle(*join_world({.backend = backend, .timeout = milliseconds(60'000)}));
      return 0;
    }
    if (name == "own-backend") {
      register_own_backend();
      const auto dist = setup_distributed(
          {.backend = kOwnBackend, .timeout = milliseconds(20'000), .device_type = c10::kCPU});
      const at::Tensor ones = at::ones({1000});
      dist.world()->all_reduce(ones).wait();
      say(fmt::format("over {}: a sum of {}, {}", dist.world()->backend(), ones[0].item<double>(),
                      num_calls_of_own_backend() > 0 ? "counted" : "not counted"));
      return 0;
    }
    if (name == "nccl-go-on") {
      keep_going(go_on_over_nccl);
      return 0;
    }
    if (name.starts_with("nccl-")) {
      fail_over_nccl(name.substr(name.find('-') + 1));
      say("nothing happened");
      return 0;
    }
    const auto world = join_world({.timeout = milliseconds(name == "absent" ? 1000 : 20'000)});
    if (name == "behind") stay_behind(*world);
    if (name == "mismatch") mismatch(*world);
    if (name == "lengths") cut_differently(*world);
    if (name == "too-much") send_too_much(*world);
    if (name == "die") die(*world);
    if (name == "chain") hold_up_a_chain(*world, milliseconds(1500));
    if (name == "chain-now") hold_up_a_chain(*world, milliseconds(120'000));
    if (name == "stop") stop(*world);
    if (name == "slow") train_with_a_slow_rank(*world);
    if (name == "abort") call_off(*world);
    if (name == "throw") throw_alone(*world);
    if (name == "early") end_early(*world);
    say("nothing happened");
    return 0;
  } catch (const CommError& error) {
    say(std::string("ended by ") + error.what());
  } catch (const Error& error) {
    say(std::string("ended by ") + error.what());
    // A process takes some time to end, and ranks that notice its loss end before it.
    std::this_thread::sleep_for(milliseconds(500));
  }
  return 3;
}

}  // namespace lockstep::comm::conformance
