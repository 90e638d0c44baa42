// A rank that joins its job's store, counts itself there, waits for all other ranks and prints what
// it knows. With a file as its argument it stays until that file exists. With the word "fence" it
// fails in the first generation, and in the next one tries to get in as a rank of the first. With
// the word "progress" it reports its progress, and in the first generation gets stuck as rank 1.
// With the word "final" the last rank fails, and says that it would only fail again; with a file
// after that, it ends only once the file exists, whatever it is told, and the file with ".said"
// after its name shows that it has said so. With the word "follow", a folder and a word for how,
// rank 1 leaves, the others fail because of that, and rank 1 is the last process to end.
#include <signal.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/launch/rank_side/launcher_line.h>
#include <lockstep/launch/rank_side/report.h>
#include <lockstep/net/secret.h>
#include <lockstep/store/client.h>

namespace lockstep {
namespace {

// Waits for a file, if one is named.
void wait_for(const std::string& file) {
  const Deadline deadline = Deadline::after(milliseconds(120'000));
  while (!file.empty() && !std::filesystem::exists(file) && !deadline.passed())
    std::this_thread::sleep_for(milliseconds(5));
}

int meet_the_others(const LaunchEnvironment& env, store::Client& store, const Deadline& deadline,
                    const std::string& file) {
  if (store.add("arrived", 1, deadline) == env.world_size) store.set("all", "here", deadline);
  store.wait({"all"}, deadline);
  fmt::print("launcher={} rank={} world={} local={}/{} node={}/{} flight={} generation={} "
             "restarts={}\n",
             launcher_name(env.launcher), env.rank, env.world_size, env.local_rank,
             env.local_world_size, env.node_rank, env.num_nodes,
             env.flight_directory.empty() ? "no" : "yes", env.generation, env.restart_count);
  std::fflush(stdout);
  wait_for(file);
  return 0;
}

int try_the_fence(const LaunchEnvironment& env, store::Client& store, const net::Secret& secret,
                  const Deadline& deadline) {
  if (env.generation == 0) {
    store.set("left behind", "by generation 0", deadline);
    return 9;
  }
  fmt::print("found: {}\n", store.get("left behind", deadline).value_or("nothing"));
  try {
    store::Client stale(net::Address::parse(env.store_endpoint, 0, "LOCKSTEP_STORE"), secret,
                        deadline);
    stale.set("from", "generation 0", deadline);
    fmt::print("a stale process got in\n");
  } catch (const CommError& error) {
    fmt::print("{}: {}\n", fault_name(error.fault()), error.what());
  }
  return 0;
}

int get_stuck(const LaunchEnvironment& env) {
  for (std::uint64_t step = 0; env.generation == 0; ++step) {
    if (env.rank != 1 || step <= 6) report_progress(step);
    std::this_thread::sleep_for(milliseconds(5));
  }
  return 0;
}

int fail_for_good(const LaunchEnvironment& env, const std::string& file) {
  if (env.rank + 1 < env.world_size) std::this_thread::sleep_for(milliseconds(60'000));
  if (!file.empty()) std::signal(SIGTERM, SIG_IGN);
  report_final_failure();
  if (!file.empty()) std::ofstream(file + ".said");
  wait_for(file);
  return 9;
}

// Rank 1 ends only when the launchers have heard that all others have ended.
int follow(const LaunchEnvironment& env, const std::filesystem::path& folder,
           const std::string& how) {
  const auto file_of = [&](int rank) { return folder / std::to_string(rank); };
  if (env.rank != 1) {
    std::ofstream(file_of(env.rank).string() + ".tmp") << ::getpid();
    std::filesystem::rename(file_of(env.rank).string() + ".tmp", file_of(env.rank));
    wait_for(file_of(1));
    blame({1}, how == "timeout" ? "timeout" : "peer lost", env.rank);
    fmt::print("lost rank 1\n");
    std::fflush(stdout);
    if (how == "abort") std::abort();
    return 1;
  }
  for (int rank = 0; rank < env.world_size; ++rank)
    if (rank != 1) wait_for(file_of(rank));
  if (how == "well") {
    std::ofstream(file_of(1));
    return 0;
  }
  std::ofstream(file_of(1));
  if (how == "timeout") wait_for(folder / "never");
  for (int rank = 0; rank < env.world_size; ++rank) {
    int pid = 0;
    if (rank != 1) std::ifstream(file_of(rank)) >> pid;
    while (pid > 0 && ::kill(pid, 0) == 0) std::this_thread::sleep_for(milliseconds(2));
  }
  fmt::print("what went wrong\n");
  return 7;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  using namespace lockstep;
  try {
    const std::string argument = argc > 1 ? argv[1] : "";
    const LaunchEnvironment env = read_launch_environment();
    if (argument == "progress") return get_stuck(env);
    if (argument == "final") return fail_for_good(env, argc > 2 ? argv[2] : "");
    if (argument == "follow") return follow(env, argv[2], argv[3]);
    const Deadline deadline = Deadline::after(milliseconds(20'000));
    const auto secret = net::Secret::from_descriptor(env.secret_fd.value());
    store::Client store(net::Address::parse(env.store_endpoint, 0, "LOCKSTEP_STORE"), secret,
                        deadline, static_cast<std::uint32_t>(env.generation));
    if (argument == "fence") return try_the_fence(env, store, secret, deadline);
    return meet_the_others(env, store, deadline, argument);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
