// A rank that stays through failures elsewhere. In each generation it meets the others in the store
// and says who it is, then waits until the launcher wants it to leave, or until the file exists
// that is its first argument. With the word "deaf" as the second, rank 0 of the first generation
// does not leave when it is asked to; with "hangs_up" it closes its line to the launcher, after
// which there is a file "hung_up" beside the first; with "hangs_up_later" it does so after it has
// left, when there is a file "hang_up" beside the first.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/launcher_line.h>
#include <lockstep/net/secret.h>
#include <lockstep/store/client.h>

namespace lockstep {
namespace {

void say_who_it_is() {
  const LaunchEnvironment env = read_launch_environment();
  const Deadline deadline = Deadline::after(milliseconds(20'000));
  store::Client store(net::Address::parse(env.store_endpoint, 0, "LOCKSTEP_STORE"),
                      net::Secret::from_descriptor(env.secret_fd.value()), deadline,
                      static_cast<std::uint32_t>(env.generation));
  if (store.add("arrived", 1, deadline) == env.world_size) store.set("all", "here", deadline);
  store.wait({"all"}, deadline);
  fmt::print("pid={} rank={} world={} generation={} restarts={} \n", ::getpid(), env.rank,
             env.world_size, env.generation, env.restart_count);
  std::fflush(stdout);
}

void hang_up(const std::filesystem::path& file) {
  ::close(static_cast<int>(environment_integer("LOCKSTEP_LINE_FD", 0, 1 << 20).value()));
  std::ofstream(file.parent_path() / "hung_up");
  while (!std::filesystem::exists(file)) ::usleep(5000);
}

// Whether the generation is over; false where the job is.
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
    if (!wait_for_the_end(line, file, misbehaves && word == "deaf")) return;
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
