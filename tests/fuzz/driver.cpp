// Runs a target over its seeds and a fixed number of mutations of them, the same ones each time:
// what every compiler can do, in a few seconds. Not a search as libFuzzer's is, but it keeps the
// targets and what they found working.
//
//   driver <folder of seeds> <mutations>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "target.h"

namespace {

using Input = std::vector<std::byte>;

// What is being run, so that a failure can be seen and kept as a seed.
Input current;  // NOLINT: read by require(), which has no other way to it

Input read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const auto view = std::as_bytes(std::span(bytes));
  return {view.begin(), view.end()};
}

class Mutator {
 public:
  explicit Mutator(std::vector<Input> seeds) : seeds_(std::move(seeds)) {}

  Input next() {
    Input input = seeds_[below(seeds_.size())];
    for (std::size_t steps = 1 + below(6); steps > 0; --steps) mutate(input);
    return input;
  }

 private:
  std::size_t below(std::size_t limit) { return limit == 0 ? 0 : random_() % limit; }
  std::byte any_byte() { return static_cast<std::byte>(random_()); }
  static auto at(Input& input, std::size_t offset) {
    return input.begin() + static_cast<std::ptrdiff_t>(offset);
  }

  void mutate(Input& input) {
    const std::size_t where = below(input.size());
    switch (below(7)) {
      case 0:  // a bit
        if (!input.empty()) input[where] ^= static_cast<std::byte>(1 << below(8));
        break;
      case 1:  // a byte
        if (!input.empty()) input[where] = any_byte();
        break;
      case 2:  // a size, as a liar would put it
        for (std::size_t i = 0; i < 4 && where + i < input.size(); ++i)
          input[where + i] = below(2) == 0 ? std::byte{0xff} : std::byte{0};
        break;
      case 3:  // something more
        input.insert(at(input, where), 1 + below(16), any_byte());
        break;
      case 4:  // something less
        input.erase(at(input, where), at(input, where + below(input.size() - where + 1)));
        break;
      case 5:  // the end
        input.resize(where);
        break;
      case 6: {  // another seed after it
        const Input& other = seeds_[below(seeds_.size())];
        input.insert(input.end(), other.begin(), other.end());
        break;
      }
    }
  }

  std::vector<Input> seeds_;
  std::mt19937_64 random_{20240229};
};

}  // namespace

void lockstep::fuzz::require(bool condition, const char* property) {
  if (condition) return;
  std::fprintf(stderr, "does not hold: %s\ninput:", property);
  for (const std::byte byte : current) std::fprintf(stderr, " %02x", std::to_integer<int>(byte));
  std::fprintf(stderr, "\n");
  std::abort();
}

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s <folder of seeds> <mutations>\n", argv[0]);
    return 2;
  }
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1]))
    paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());  // a folder has no order of its own
  std::vector<Input> seeds;
  for (const auto& path : paths) seeds.push_back(read(path));
  if (seeds.empty()) {
    std::fprintf(stderr, "no seeds in %s\n", argv[1]);
    return 2;
  }
  const auto run = [](Input input) {
    current = std::move(input);
    lockstep::fuzz::run(current);
  };
  for (const Input& seed : seeds) run(seed);
  Mutator mutator(seeds);
  const long mutations = std::strtol(argv[2], nullptr, 10);
  for (long i = 0; i < mutations; ++i) run(mutator.next());
  std::printf("%zu seeds and %ld mutations of them passed\n", seeds.size(), mutations);
  return 0;
}
