// LibTorch's generator for the CPU, advanced without computing what it would have drawn.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/CPUGeneratorImpl.h>

namespace lockstep::deferred {

using TwisterState = at::mt19937_data_pod;

// Leaves the state as `draws` draws of 32 bits would.
void skip(TwisterState& state, std::uint64_t draws);

// How many draws lead from one state to the other. Nothing where it takes more than `most`.
std::optional<std::uint64_t> draws_between(const TwisterState& from, const TwisterState& to,
                                           std::uint64_t most);

}  // namespace lockstep::deferred
