// A rank that stays when other ranks fail. In each generation it meets the others in the store and
// prints who it is, then waits until the launcher asks it to leave, or until the file in its first
// argument exists. The second argument changes that. "deaf": rank 0 of the first generation does
// not leave when it is asked to. "hangs_up": it closes its line to the launcher, after which there
// is a file "hung_up" beside the first. "hangs_up_later": it does so after it has left, when there
// is a file "hang_up" beside the first. "fails_for_good": it waits until it is told to leave,
// ignores that, and fails, saying that it would only fail again. "completes": all ranks of the
// first generation leave a key in its store before they leave it.
#include <poll.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/launch/rank_side/launcher_line.h>
#include <lockstep/launch/rank_side/report.h>
#include <lockstep/net/secret.h>
#include <lockstep/store/client.h>

namespace lockstep {
namespace {

store::Client join_store(const LaunchEnvironment& env, const Deadline& deadline) {
  return store::Client(net::Address::parse(env.store_endpoint, 0, "LOCKSTEP_STORE"),
                       net::Secret::from_descriptor(env.secret_fd.value()), deadline,
                       static_cast<std::uint32_t>(env.generation));
}

void say_who_it_is() {
  const LaunchEnvironment env = read_launch_environment();
  const Deadline deadline = Deadline::after(milliseconds(20'000));
  store::Client store = join_store(env, deadline);
  if (store.add("arrived", 1, deadline) == env.world_size) store.set("all", "here", deadline);
  store.wait({"all"}, deadline);
  fmt::print("pid={} rank={} world={} generation={} restarts={} \n", ::getpid(), env.rank,
             env.world_size, env.generation, env.restart_count);
  std::fflush(stdout);
}

void complete_a_step() {
  const Deadline deadline = Deadline::after(milliseconds(20'000));
  join_store(read_launch_environment(), deadline).set("step", "complete", deadline);
  fmt::print("completed a step\n");
  std::fflush(stdout);
}

int line_descriptor() {
  return static_cast<int>(environment_integer("LOCKSTEP_LINE_FD", 0, 1 << 20).value());
}

[[noreturn]] void fail_for_good() {
  pollfd line{line_descriptor(), POLLIN, 0};
  ::poll(&line, 1, 60'000);
  report_final_failure();
  std::exit(9);
}

void hang_up(const std::filesystem::path& file) {
  ::close(line_descriptor());
  std::ofstream(file.parent_path() / "hung_up");
  while (!std::filesystem::exists(file)) ::usleep(5000);
}

// Waits for the end of the generation; false if the job ends.
bool wait_for_the_end(const LauncherLine& line, const std::filesystem::path& file, bool deaf) {
  while (!std::filesystem::exists(file)) {
    const auto message = line.hear(Deadline::after(milliseconds(5)));
    if (!message || deaf) continue;
    fmt::print("told to leave{}\n", message->word == LineMessage::Word::leave_soon ? " soon" : "");
    std::fflush(stdout);
    return true;
  }
  return false;
}

void stay(const std::filesystem::path& file, const std::string& word) {
  const auto line = LauncherLine::inherited().value();
  line.say(LineMessage::Word::stays);
  fmt::print("pid={} stays\n", ::getpid());
  std::fflush(stdout);
  await_place_as_spare();
  while (true) {
    say_who_it_is();
    const LaunchEnvironment env = read_launch_environment();
    const bool misbehaves = env.rank == 0 && env.generation == 0;
    if (misbehaves && word == "hangs_up") return hang_up(file);
    if (misbehaves && word == "fails_for_good") fail_for_good();
    if (!wait_for_the_end(line, file, misbehaves && word == "deaf")) return;
    if (env.generation == 0 && word == "completes") complete_a_step();
    line.say(LineMessage::Word::left);
    if (misbehaves && word == "hangs_up_later") {
      while (!std::filesystem::exists(file.parent_path() / "hang_up")) ::usleep(5000);
      return hang_up(file);
    }
    await_place(line);
  }
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  try {
    lockstep::stay(argc > 1 ? argv[1] : "", argc > 2 ? argv[2] : "");
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
