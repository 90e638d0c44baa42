// A checkpoint's tensors into those that a rank holds parts of.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>

#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/mesh/held_tensor.h>

namespace lockstep::checkpoint {

using StoredTensors = std::map<std::string, TensorRecord>;

// What of the tensors is not stored, or in another shape or type; empty where all fits.
std::string fit_fault(const StoredTensors& stored, std::span<const mesh::HeldTensor> tensors);

// Where what is read of a tensor is put: its own memory where that is on the host and dense,
// otherwise a copy there. The tensor outlives it.
class HeldBytes {
 public:
  explicit HeldBytes(const mesh::HeldTensor& tensor);

  // Whether they are the tensor's own memory.
  bool direct() const { return host_.is_same(tensor_.values); }
  // All of it, in the order of its placement.
  std::span<std::byte> span() const;
  // To be called once they are filled: moves them where they belong.
  void finish();

 private:
  const mesh::HeldTensor& tensor_;
  at::Tensor host_;
};

// Reads into them, without a conversion: to the bit. Failure: as CheckpointReader; some may have
// been read by then.
void load_held(CheckpointReader& reader, std::span<const mesh::HeldTensor> tensors);

}  // namespace lockstep::checkpoint
