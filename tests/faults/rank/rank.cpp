// The training that the fault suite disturbs: Trainer trains a small net with dropout on samples
// that are numbers. Each rank logs which samples it took in which step, and when. In the first
// generation of the job, one rank can be told to fail at some point of a step:
//
//   fault_rank --output RUN --log FOLDER [--epochs 2] [--batch 12] [--interval 4] [--pace 10]
//       [--pace-until FILE] [--dropout 0.1] [--non-finite stop|skip] [--copies 0] [--again 0]
//       [--rank 1 --step 7 --fault forward|backward|collective|stuck|slow|nan_loss|inf_loss|
//       nan_gradient|inf_gradient]
//
// --batch is the batch of all ranks together. --pace is the least number of milliseconds for a step
// (until FILE exists, if one is named). --interval is the number of steps between checkpoints, and
// --copies that between copies in other ranks' memory, with which ranks stay when another is lost
// (0: no rank stays). With --again 1 the process that replaces the failed one is killed as soon as
// it exists. Lines of the log:
//
//   step 7 at 81234567 samples 3 1 4          step 7 (from 0) begins; times are in nanoseconds
//   dies at 81234567                          the rank dies right after this line
//   failed at 81234567 ranks 1                a CommError that names rank 1
//   stopped at 81234567                       all ranks gave up together
//   ended at 81234567 step 20 skipped 0 weights <hash>
#include <signal.h>
#include <time.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include <spdlog/fmt/ranges.h>
#include <torch/torch.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/hash.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/recovery/keep_going.h>
#include <lockstep/recovery/peer_copies.h>
#include <lockstep/train/trainer.h>

namespace lockstep {
namespace {

constexpr std::int64_t kSamples = 120;
constexpr std::int64_t kFeatures = 8;

// A clock that all processes of a host share, and that nobody sets.
std::int64_t now_ns() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

class Options {
 public:
  Options(int count, char** words) {
    for (int i = 1; i + 1 < count; i += 2) values_[std::string(words[i]).substr(2)] = words[i + 1];
  }
  std::string text(const std::string& name, const std::string& otherwise = "") const {
    const auto found = values_.find(name);
    return found == values_.end() ? otherwise : found->second;
  }
  std::int64_t number(const std::string& name, std::int64_t otherwise) const {
    return std::stoll(text(name, std::to_string(otherwise)));
  }

 private:
  std::map<std::string, std::string> values_;
};

// Each line is in the file before the next thing happens, whatever that is.
class Log {
 public:
  Log(const std::string& folder, const LaunchEnvironment& env)
      : file_(std::fopen(fmt::format("{}/{}-{}", folder, env.generation, env.rank).c_str(), "a")) {}

  void say(const std::string& line) {
    fmt::print(file_, "{}\n", line);
    std::fflush(file_);
  }

 private:
  std::FILE* file_;
};

struct Net : torch::nn::Module {
  explicit Net(double share_dropped) : dropout(share_dropped) {
    register_module("first", first);
    register_module("second", second);
    register_module("dropout", dropout);
  }
  torch::Tensor forward(const torch::Tensor& input) {  // [samples, features] -> [samples, 1]
    return second(dropout(torch::tanh(first(input))));
  }
  torch::nn::Linear first{kFeatures, 32}, second{32, 1};
  torch::nn::Dropout dropout;
};

// A sample's first number is its index.
class Numbers : public data::Dataset {
 public:
  std::int64_t size() const override { return kSamples; }
  data::Batch batch(std::span<const std::int64_t> indices) const override {
    const auto numbers =
        torch::tensor(std::vector<std::int64_t>(indices.begin(), indices.end())).to(torch::kFloat);
    const auto powers = torch::arange(kFeatures, torch::kFloat);
    const auto features = torch::sin(numbers.unsqueeze(1) * (powers + 1) * 0.37);
    return {.input = torch::cat({numbers.unsqueeze(1), features.narrow(1, 1, kFeatures - 1)}, 1),
            .target = torch::cos(numbers * 0.21).unsqueeze(1)};
  }
};

class DisturbedTask : public train::Task {
 public:
  DisturbedTask(const Options& options, Log& log, const LaunchEnvironment& env)
      : log_(log),
        net_(std::make_shared<Net>(std::stod(options.text("dropout", "0.1")))),
        pace_(options.number("pace", 0)),
        paced_until_(options.text("pace-until")),
        fault_(options.text("fault")),
        step_of_fault_(options.number("step", -1)),
        is_victim_(env.rank == options.number("rank", -1)),
        is_behind_victim_(env.rank > options.number("rank", -1)),
        first_generation_(env.generation == 0) {}

  std::shared_ptr<torch::nn::Module> model() const override { return net_; }
  const Net& net() const { return *net_; }

  void begin(std::int64_t step, const std::vector<std::int64_t>&) override { step_ = step; }

  nn::LossSum loss(const data::Batch& batch) override {
    std::string line = fmt::format("step {} at {} samples", step_, now_ns());
    const auto numbers = batch.input.select(1, 0).contiguous();
    for (std::int64_t i = 0; i < numbers.numel(); ++i)
      line += fmt::format(" {:.0f}", numbers[i].item<float>());
    log_.say(line);
    if (paced_until_.empty() || !std::filesystem::exists(paced_until_))
      std::this_thread::sleep_for(milliseconds(pace_));
    const bool now = first_generation_ && step_ == step_of_fault_;
    if (first_generation_ && fault_ == "slow" && is_victim_ && step_ >= step_of_fault_)
      std::this_thread::sleep_for(milliseconds(pace_));
    if (now && fault_ == "collective") wait_inside_of_one();
    if (now && is_victim_ && fault_ == "stuck") get_stuck();
    if (now && is_victim_ && fault_ == "forward") die();
    // The index itself is too large to learn from.
    auto output = net_->forward(batch.input / kSamples);
    if (now && is_victim_) output = disturbed(output);
    return {.sum = torch::mse_loss(output, batch.target, torch::Reduction::Sum),
            .count = batch.size()};
  }

  train::Evaluation evaluate(const data::Batch& batch) override {
    return {.loss = loss(batch), .metric_sums = {}};
  }

 private:
  [[noreturn]] void die() {
    log_.say(fmt::format("dies at {}", now_ns()));
    ::raise(SIGKILL);
    std::terminate();
  }

  [[noreturn]] void get_stuck() {
    log_.say(fmt::format("dies at {}", now_ns()));
    while (true) std::this_thread::sleep_for(milliseconds(10));
  }

  // The victim is in the exchange of gradients when it dies, and so are the ranks below it; higher
  // ranks enter the exchange only later.
  void wait_inside_of_one() {
    if (is_behind_victim_) {
      std::this_thread::sleep_for(milliseconds(700));
      return;
    }
    if (!is_victim_) return;
    std::thread([this] {
      std::this_thread::sleep_for(milliseconds(350));
      die();
    }).detach();
  }

  torch::Tensor disturbed(torch::Tensor output) {
    constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    if (fault_ == "nan_loss") return output * kNan;
    if (fault_ == "inf_loss") return output + kInfinity;
    if (fault_ == "nan_gradient")
      output.register_hook([](auto gradient) { return gradient * kNan; });
    if (fault_ == "inf_gradient")
      output.register_hook([](auto gradient) { return gradient + kInfinity; });
    if (fault_ == "backward")
      output.register_hook([this](const torch::Tensor&) -> torch::Tensor { die(); });
    return output;
  }

  Log& log_;
  std::shared_ptr<Net> net_;
  std::int64_t pace_;
  std::filesystem::path paced_until_;
  std::string fault_;
  std::int64_t step_of_fault_;
  bool is_victim_, is_behind_victim_, first_generation_;
  std::int64_t step_ = 0;
};

std::string weights_text(const Net& net) {
  std::string bytes;
  for (const auto& parameter : net.parameters()) {
    const auto whole = parameter.detach().contiguous();
    bytes.append(static_cast<const char*>(whole.data_ptr()), whole.nbytes());
  }
  return fmt::format("{:x}", hash_text(bytes));
}

int train(const Options& options, const std::shared_ptr<PeerCopies>& copies) {
  const LaunchEnvironment env = read_launch_environment();
  Log log(options.text("log"), env);
  torch::manual_seed(1);
  if (env.generation == 1 && env.rank == options.number("rank", -1) &&
      options.number("again", 0) == 1)
    ::raise(SIGKILL);
  try {
    auto dist = setup_distributed({.timeout = milliseconds(options.number("timeout", 60'000)),
                                   .device_type = c10::DeviceType::CPU});
    auto task = std::make_shared<DisturbedTask>(options, log, env);
    const train::TrainerOptions how{.epochs = options.number("epochs", 2),
                                    .batch_size = options.number("batch", 12) / dist.world_size(),
                                    .learning_rate = 1e-2,
                                    .on_non_finite = options.text("non-finite") == "skip"
                                                         ? train::NonFinite::skip
                                                         : train::NonFinite::stop,
                                    .seed = 3,
                                    .output = options.text("output"),
                                    .checkpoint_interval = options.number("interval", 4),
                                    .memory_interval = options.number("copies", 0),
                                    .peer_copies = copies,
                                    .tensorboard = false,
                                    .steps_per_print = 1};
    train::Trainer trainer(dist, task, how);
    const auto result = trainer.fit(std::make_shared<Numbers>(), nullptr);
    log.say(fmt::format("ended at {} step {} skipped {} weights {}", now_ns(), result.step,
                        result.skipped_steps, weights_text(task->net())));
    return result.end == train::TrainingResult::End::finished ? 0 : 128 + result.signal;
  } catch (const train::TrainingStopped& error) {
    log.say(fmt::format("stopped at {}", now_ns()));
    fmt::print(stderr, "{}\n", error.what());
    return 3;
  } catch (const CommError& error) {
    log.say(fmt::format("failed at {} ranks {}", now_ns(), fmt::join(error.ranks(), " ")));
    throw;
  }
}

int run(const Options& options) {
  at::set_num_threads(1);
  if (options.number("copies", 0) == 0) return train(options, nullptr);
  const auto copies = std::make_shared<PeerCopies>();
  int status = 0;
  keep_going([&] { status = train(options, copies); });
  return status;
}

}  // namespace
}  // namespace lockstep

int main(int count, char** words) {
  try {
    return lockstep::run(lockstep::Options(count, words));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
