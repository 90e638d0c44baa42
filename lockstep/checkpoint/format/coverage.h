// How much of a tensor its pieces hold.
#pragma once

#include <cstdint>

#include <lockstep/checkpoint/format/manifest.h>

namespace lockstep::checkpoint {

// Elements that some piece holds, however many do. Thousands of pieces take no time where their
// boxes are alike or apart, as those of any layout are. DamagedCheckpoint where others overlap in
// so many places that nobody has written them.
std::int64_t covered_elements(const TensorRecord& tensor);

}  // namespace lockstep::checkpoint
