// A loop over LibTorch's threads.
#pragma once

#include <cstdint>
#include <functional>

namespace lockstep::device {

// Calls body(begin, end) over pieces that make up [0, count), each beginning at a multiple of
// `grain`; from several threads where LibTorch has as many (at::set_num_threads) and this is not
// one of them already. Throws what a body threw.
//
// at::parallel_for is a template, which has threads only where it is compiled with the OpenMP that
// LibTorch was: PyTorch's wheels bring one of their own, and a second beside it would have threads
// and settings of its own. This goes through compiled code of LibTorch's instead.
void parallel_pieces(std::int64_t count, std::int64_t grain,
                     const std::function<void(std::int64_t begin, std::int64_t end)>& body);

}  // namespace lockstep::device
