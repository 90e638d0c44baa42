// A checkpoint's tensors into those that a rank holds parts of.
#pragma once

#include <span>
#include <string>

#include <lockstep/checkpoint/reader.h>
#include <lockstep/mesh/held_tensor.h>

namespace lockstep::checkpoint {

// What of them the checkpoint does not have, or has in another shape or type; empty where all fits.
std::string fit_fault(const CheckpointReader& reader, std::span<const mesh::HeldTensor> tensors);

// Reads into them, without a conversion: to the bit. Failure: as CheckpointReader; some may have
// been read by then.
void load_held(CheckpointReader& reader, std::span<const mesh::HeldTensor> tensors);

}  // namespace lockstep::checkpoint
