// Runs many small pieces of work on a few threads.
#pragma once

#include <cstddef>
#include <functional>

namespace lockstep {

// Calls work(0), …, work(count - 1), each once, in about this order, on this thread and at most
// num_threads - 1 more. If a call throws, no further ones begin; when all that have begun are done,
// the error of the one with the lowest number is thrown here.
void on_threads(std::size_t count, int num_threads, const std::function<void(std::size_t)>& work);

}  // namespace lockstep
