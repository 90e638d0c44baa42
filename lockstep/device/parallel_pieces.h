// A loop over LibTorch's threads.
#pragma once

#include <cstdint>
#include <functional>

namespace lockstep::device {

// Calls body(begin, end) for pieces that make up [0, count), each beginning at a multiple of
// `grain`. Uses LibTorch's threads (at::set_num_threads), unless this thread is already one of
// them. Throws a body's exception.
//
// at::parallel_for is a template, which has threads only if it is compiled with LibTorch's own
// OpenMP. PyTorch's wheels bring one, and a second OpenMP beside it would have threads and settings
// of its own. This goes through compiled code of LibTorch's instead.
void parallel_pieces(std::int64_t count, std::int64_t grain,
                     const std::function<void(std::int64_t begin, std::int64_t end)>& body);

}  // namespace lockstep::device
