// The entry that libFuzzer calls.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "target.h"

void lockstep::fuzz::require(bool condition, const char* property) {
  if (condition) return;
  std::fprintf(stderr, "does not hold: %s\n", property);
  std::abort();
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  lockstep::fuzz::run(std::as_bytes(std::span(data, size)));
  return 0;
}
