// An optimizer whose memory is counted for as long as it is there.
#pragma once

#include <cstdint>
#include <memory>

#include <lockstep/optim/optimizer.h>

namespace lockstep::optim {

// Adds the bytes of its state to `total`, and takes them away again when it goes.
std::unique_ptr<Optimizer> counted(std::unique_ptr<Optimizer> optimizer,
                                   std::shared_ptr<std::int64_t> total);

}  // namespace lockstep::optim
