// Many small pieces of work on a few threads.
#pragma once

#include <cstddef>
#include <functional>

namespace lockstep {

// Calls work(0), …, work(count - 1), each once, in about this order, on this thread and at most
// num_threads - 1 more. Where some throw, what the first of them threw is thrown here, when all
// that had begun are done; what had not begun by then is left out.
void on_threads(std::size_t count, int num_threads, const std::function<void(std::size_t)>& work);

}  // namespace lockstep
