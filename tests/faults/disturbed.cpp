#include "disturbed.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include <gmock/gmock.h>

#include <lockstep/checkpoint/format/folder.h>

#include "tests/base/files.h"
#include "tests/base/shared_memory_names.h"

namespace lockstep::faults {

namespace fs = std::filesystem;

namespace {

constexpr milliseconds kLongest(180'000);
constexpr int kSamples = 120;  // the same as in rank/rank.cpp

Event parse_event(int generation, int rank, const std::string& line) {
  Event event{.generation = generation, .rank = rank, .text = line};
  std::istringstream words(line);
  std::string word;
  words >> event.kind;
  while (words >> word) {
    if (word == "step") words >> event.step;
    if (event.kind == "step" && event.step < 0) event.step = std::stoll(word);
    if (word == "at") words >> event.at_ns;
    if (word == "samples" || word == "ranks")
      for (int value = 0; words >> value;) event.values.push_back(value);
  }
  return event;
}

}  // namespace

DisturbedTraining::DisturbedTraining() : files_(1) {}

Words DisturbedTraining::ranks_words(const Job& job, const std::string& name) {
  const fs::path log = files_.folder() / ("log-" + name);
  fs::create_directories(log);
  Words words = {FAULT_RANK, "--output", output(name).string(), "--log", log.string()};
  words.insert(words.end(), job.rank.begin(), job.rank.end());
  return words;
}

Words DisturbedTraining::variables(Words more) const {
  more.push_back("OMP_NUM_THREADS=1");
  more.push_back("LOCKSTEP_FLIGHT_DIR=" + (files_.folder() / "flight").string());
  return more;
}

void DisturbedTraining::note_start(const std::string& name) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  started_ns_.try_emplace(name, std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

void DisturbedTraining::expect_within(double owed, double seconds, const std::string& name) const {
  constexpr double kUsualStart = 2;
  const double start = static_cast<double>(first("step", name).at_ns - started_ns_.at(name)) / 1e9;
  const double excused = 3 * std::max(0.0, start - kUsualStart);
  EXPECT_LE(seconds, owed + excused)
      << owed << " s are owed; starting took " << start << " s on this machine";
}

Launched DisturbedTraining::start(const Job& job, const std::string& name) {
  note_start(name);
  Words words = {LOCKSTEP_PROGRAM, "run", "--nproc-per-node", std::to_string(job.num_ranks)};
  words.insert(words.end(), job.launcher.begin(), job.launcher.end());
  const Words program = ranks_words(job, name);
  words.insert(words.end(), program.begin(), program.end());
  return Launched(std::move(words), variables(job.variables));
}

Result DisturbedTraining::result(const std::string& name) const {
  if (files_.checkpoint(name).empty()) return {};
  return {.weights = files_.weights(name), .losses = files_.losses(name)};
}

const Result& DisturbedTraining::undisturbed(int world_size, const Words& rank) {
  static std::map<std::pair<int, Words>, Result> all;
  Result& whole = all[{world_size, rank}];
  if (!whole.losses.empty()) return whole;
  Launched job = start({.num_ranks = world_size, .rank = rank}, "whole");
  EXPECT_EQ(job.wait(kLongest), 0) << job.output() << job.error();
  expect_each_sample_once("whole");
  whole = result("whole");
  return whole;
}

std::vector<Event> DisturbedTraining::events(const std::string& name) const {
  std::vector<Event> all;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(files_.folder() / ("log-" + name), none)) {
    const std::string file = entry.path().filename().string();
    const auto dash = file.find('-');
    const int generation = std::stoi(file.substr(0, dash));
    const int rank = std::stoi(file.substr(dash + 1));
    std::istringstream lines(lockstep::testing::read_file(entry.path()));
    // A line that is still being written does not count.
    for (std::string line; std::getline(lines, line) && !lines.eof();)
      all.push_back(parse_event(generation, rank, line));
  }
  std::ranges::stable_sort(all, {}, &Event::at_ns);
  return all;
}

Event DisturbedTraining::first(const std::string& kind, const std::string& name) const {
  const auto all = events(name);
  const auto found = std::ranges::find(all, kind, &Event::kind);
  EXPECT_NE(found, all.end()) << "no rank says '" << kind << "'";
  return found == all.end() ? Event{} : *found;
}

bool DisturbedTraining::reaches(std::int64_t step, int generation, const std::string& name) const {
  return launch::testing::eventually(kLongest, [&] {
    return std::ranges::any_of(events(name), [&](const Event& event) {
      return event.kind == "step" && event.step >= step && event.generation >= generation;
    });
  });
}

void DisturbedTraining::expect_undisturbed_result(int world_size, const Words& rank,
                                                  const std::string& name) {
  const Result& whole = undisturbed(world_size, rank);
  const Result disturbed = result(name);
  ASSERT_FALSE(whole.losses.empty());
  EXPECT_EQ(disturbed.losses, whole.losses);
  EXPECT_TRUE(disturbed.weights == whole.weights) << "other weights";
  expect_each_sample_once(name);
}

void DisturbedTraining::expect_each_sample_once(const std::string& name) const {
  // Takes the last attempt at each step: the rank that began it last tells which generation that
  // is.
  const auto all = events(name);
  std::map<std::int64_t, int> generations;
  for (const Event& event : all)
    if (event.kind == "step") generations[event.step] = event.generation;
  std::map<std::int64_t, std::map<int, std::vector<int>>> samples;  // step, rank
  for (const Event& event : all)
    if (event.kind == "step" && event.generation == generations[event.step])
      samples[event.step][event.rank] = event.values;
  std::multiset<int> epoch;
  std::multiset<int> every;
  for (int sample = 0; sample < kSamples; ++sample) every.insert(sample);
  for (const auto& [step, ranks] : samples) {
    for (const auto& [rank, values] : ranks) epoch.insert(values.begin(), values.end());
    if (epoch.size() < every.size()) continue;
    EXPECT_EQ(epoch, every) << "in the epoch that ends with step " << step << " of " << name;
    epoch.clear();
  }
  EXPECT_TRUE(epoch.empty()) << "the last epoch is not whole";
}

void DisturbedTraining::expect_nothing_left(const Launched& job) const {
  EXPECT_TRUE(job.all_gone(milliseconds(60'000))) << "processes are left";
  EXPECT_THAT(lockstep::testing::shared_memory_names(), ::testing::IsEmpty());
}

nlohmann::json DisturbedTraining::only_fault(const Launched& job) const {
  const auto faults = launch::testing::faults_in(job.error());
  EXPECT_EQ(faults.size(), 1u) << job.error();
  if (faults.empty()) return nlohmann::json::object();
  return nlohmann::json::parse(faults.front());
}

bool DisturbedHosts::connect(int num_hosts) {
  network_ = std::make_unique<Network>(num_hosts);
  const fs::path file = files_.folder() / "secret";
  lockstep::testing::write_file(file, std::string(32, 's'));
  fs::permissions(file, fs::perms::owner_read | fs::perms::owner_write);
  secret_ = file.string();
  for (int host = 0; host < num_hosts; ++host)
    endpoints_ += (host == 0 ? "" : ",") + Network::address(host) + ":29400";
  return network_->works();
}

Launched DisturbedHosts::start_on(int host, const Job& job, const std::string& name) {
  note_start(name);
  Words words = {"ip",
                 "netns",
                 "exec",
                 network_->name(host),
                 LOCKSTEP_PROGRAM,
                 "run",
                 "--local-addr",
                 "host" + std::to_string(host),
                 "--rdzv-endpoint",
                 endpoints_,
                 "--secret-file",
                 secret_,
                 "--nproc-per-node",
                 std::to_string(job.num_ranks)};
  words.insert(words.end(), job.launcher.begin(), job.launcher.end());
  const Words program = ranks_words(job, name);
  words.insert(words.end(), program.begin(), program.end());
  return Launched(std::move(words), variables(job.variables));
}

Words with_shim(Words variables) {
  variables.push_back(std::string("LD_PRELOAD=") + FAULT_SHIM);
  return variables;
}

pid_t process_of_rank(const Launched& job, int rank) {
  const std::string variable = '\0' + ("RANK=" + std::to_string(rank)) + '\0';
  for (const pid_t pid : job.alive()) {
    const std::string environment =
        lockstep::testing::read_file("/proc/" + std::to_string(pid) + "/environ");
    if (('\0' + environment).find(variable) != std::string::npos) return pid;
  }
  return -1;
}

double seconds_between(const Event& first, const Event& second) {
  return static_cast<double>(second.at_ns - first.at_ns) / 1e9;
}

}  // namespace lockstep::faults
