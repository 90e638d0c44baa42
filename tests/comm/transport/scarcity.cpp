#include "scarcity.h"

#include <cstdlib>
#include <new>

namespace {

// How many more allocations of this thread succeed; negative: all of them.
thread_local int allocations_left = -1;

void* allocate(std::size_t size) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t size) { return allocate(size); }
void* operator new[](std::size_t size) { return allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace lockstep::comm::testing {

Scarcity::Scarcity(int allowed) { allocations_left = allowed; }
Scarcity::~Scarcity() { allocations_left = -1; }
bool Scarcity::felt() { return allocations_left == 0; }

}  // namespace lockstep::comm::testing
