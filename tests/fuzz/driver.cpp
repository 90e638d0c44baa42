// Runs a target over its corpus and over mutations of it, with any compiler. This is no search like
// libFuzzer's, but it keeps the targets and their findings working.
//
//   driver <corpus> <mutations>           this many, the same ones each time
//   driver <corpus> --seconds <seconds>   others each time; an input that fails is kept as ./crash
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string_view>
#include <vector>

#include "target.h"

namespace {

using Input = std::vector<std::byte>;

// The input of the current run, so that a failure can be shown and kept in the corpus.
Input current;  // NOLINT: read by require() and keep(), which have no other way to it

// Keeps the input that makes the process die.
void keep(int signal) {
  const int fd = ::open("crash", O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd >= 0) {
    [[maybe_unused]] const auto written = ::write(fd, current.data(), current.size());
    ::close(fd);
  }
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

Input read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const auto view = std::as_bytes(std::span(bytes));
  return {view.begin(), view.end()};
}

class Mutator {
 public:
  Mutator(std::vector<Input> seeds, std::uint64_t seed) : seeds_(std::move(seeds)), random_(seed) {}

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
      case 0:  // flip a bit
        if (!input.empty()) input[where] ^= static_cast<std::byte>(1 << below(8));
        break;
      case 1:  // change a byte
        if (!input.empty()) input[where] = any_byte();
        break;
      case 2:  // write a size, as an attacker would
        for (std::size_t i = 0; i < 4 && where + i < input.size(); ++i)
          input[where + i] = below(2) == 0 ? std::byte{0xff} : std::byte{0};
        break;
      case 3:  // insert something
        input.insert(at(input, where), 1 + below(16), any_byte());
        break;
      case 4:  // remove something
        input.erase(at(input, where), at(input, where + below(input.size() - where + 1)));
        break;
      case 5:  // cut the end off
        input.resize(where);
        break;
      case 6: {  // append another seed
        const Input& other = seeds_[below(seeds_.size())];
        input.insert(input.end(), other.begin(), other.end());
        break;
      }
    }
  }

  std::vector<Input> seeds_;
  std::mt19937_64 random_;
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
  const bool by_time = argc == 4 && std::string_view(argv[2]) == "--seconds";
  if (argc != 3 && !by_time) {
    std::fprintf(stderr, "usage: %s <corpus> <mutations>, or <corpus> --seconds <seconds>\n",
                 argv[0]);
    return 2;
  }
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1]))
    paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());  // a folder has no order of its own
  std::vector<Input> seeds;
  for (const auto& path : paths) seeds.push_back(read(path));
  if (seeds.empty()) {
    std::fprintf(stderr, "nothing in %s\n", argv[1]);
    return 2;
  }
  if (by_time)
    for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) ::signal(signal, keep);
  const auto run = [](Input input) {
    current = std::move(input);
    lockstep::fuzz::run(current);
  };
  for (const Input& seed : seeds) run(seed);
  constexpr std::uint64_t kSameEachTime = 20240229;
  Mutator mutator(seeds, by_time ? std::random_device{}() : kSameEachTime);
  const long limit = std::strtol(argv[by_time ? 3 : 2], nullptr, 10);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(limit);
  long mutations = 0;
  for (; by_time ? std::chrono::steady_clock::now() < end : mutations < limit; ++mutations)
    run(mutator.next());
  std::printf("%zu inputs and %ld mutations of them passed\n", seeds.size(), mutations);
  return 0;
}
