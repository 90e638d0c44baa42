// Trains the models of libmy_models.so with the installed `lockstep train`, goes on on another
// number of ranks, and makes every mistake once.
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace {

namespace fs = std::filesystem;

const fs::path kFolder = FOLDER;
// The paths of flags start from the current folder.
const std::string kElsewhere = "--set output=" + (kFolder / "runs/x").string();
int num_failures = 0;

struct Ended {
  int code = 0;
  std::string text;
};

Ended train(const std::string& flags) {
  const fs::path said = kFolder / "said.txt";
  const std::string command = "OMP_NUM_THREADS=1 " LOCKSTEP " train " +
                              (kFolder / "config.json").string() + " " + flags + " > " +
                              said.string() + " 2>&1 < /dev/null";
  const int status = std::system(command.c_str());
  std::ostringstream text;
  text << std::ifstream(said).rdbuf();
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text.str()};
}

void expect(const Ended& ended, int code, const std::string& part) {
  if (ended.code == code && ended.text.find(part) != std::string::npos) return;
  ++num_failures;
  std::printf("wanted exit code %d and '%s', got %d and:\n%s\n", code, part.c_str(), ended.code,
              ended.text.c_str());
}

// The library as one that was built with another version.
void write_other(const fs::path& library) {
  std::ostringstream bytes;
  bytes << std::ifstream(kFolder / "libmy_models.so", std::ios::binary).rdbuf();
  std::string text = bytes.str();
  const std::string mark = "Library{Lockstep ";
  for (auto at = text.find(mark); at != text.npos; at = text.find(mark, at + 1))
    if (text[at + mark.size()] != '?') text[at + mark.size()] = '9';
  std::ofstream(library, std::ios::binary) << text;
}

}  // namespace

int main() {
  fs::remove_all(kFolder / "runs");
  std::ofstream(kFolder / "config.json") << R"({
    "model": {"library": "libmy_models.so", "name": "MyNet", "options": {"hidden": 4}},
    "train_batch_size": 12,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-2}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2}},
    "epochs": 3,
    "device": "cpu",
    "output": "runs/mine",
    "validation": {"interval": 4, "batches": 0},
    "checkpoint": {"interval": 4},
    "zero_optimization": {"stage": 3},
    "steps_per_print": 4
  })";
  // 41 samples are four steps of an epoch.
  expect(train("--nproc-per-node 2"), 0, "done at step 12");
  std::ostringstream metrics;
  metrics << std::ifstream(kFolder / "runs/mine/metrics.csv").rdbuf();
  if (metrics.str().find("close") == std::string::npos) {
    ++num_failures;
    std::printf("the metric of the library is missing:\n%s\n", metrics.str().c_str());
  }
  expect(train("--nproc-per-node 3 --set epochs=5 --set sharding_strategy=NO_SHARD "
               "--set zero_optimization=null"),
         0, "goes on from step 12");
  expect(train("--set 'model.name=\"a plain line\"' --set model.options=null --set output=" +
               (kFolder / "runs/plain").string()),
         0, "done at step 6");

  expect(train("--set model.library=nowhere.so"), 2, "nowhere.so': there is no such file");
  expect(train("--set model.library=" + (kFolder / "config.json").string()), 2,
         "has no model for lockstep train");
  expect(train("--set model.name=Other " + kElsewhere), 2, "model.name is \"Other\", and");
  expect(train("--set model.name=Other " + kElsewhere), 2, "has \"MyNet\", \"a plain line\"");
  expect(train("--set model.options.depth=2 " + kElsewhere), 2,
         "model.options has \"depth\", which MyNet does not know: it knows fails, hidden");
  expect(train("--set model.options.hidden=2.5 " + kElsewhere), 2,
         "model.options.hidden is 2.5: it must be a whole number");
  expect(train("--set model.options.fails=true " + kElsewhere), 2, "the library's own mistake, 4");
  write_other(kFolder / "other.so");
  expect(train("--set model.library=" + (kFolder / "other.so").string() + " " + kElsewhere), 2,
         "built with Lockstep 9.");
  expect(train("--set data.train=x.txt"), 2, "the library of model.library has its own data set");
  expect(train("--set parallel.pipeline=2"), 2, "spreads a library's model over the axes");
  expect(train("--describe"), 2, "looks into built-in models alone");
  expect(train("--nproc-per-node 2 --set parallel.tensor=3"), 2,
         "do not divide into groups of so many");
  std::printf("%d failures\n", num_failures);
  return num_failures == 0 ? 0 : 1;
}
