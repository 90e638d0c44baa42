// The parts of tensors that a rank holds: copied to the host for a checkpoint, which is written
// while they change, and filled from one.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/checkpoint/format/piece_file.h>
#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/mesh/tensors.h>

namespace lockstep::checkpoint {

// The descriptions of the tensors that other ranks are told.
std::vector<HeldPiece> held_pieces(std::span<const mesh::HeldTensor> tensors);

// A copy in the host's memory of what a rank writes, as the tensors may change while it is written.
//
// Ownership: owns its memory and keeps it for the next time; it is pinned where the tensors are on
// a GPU. Threading: one thread at a time. Failure: UsageError that names the tensor where it is
// undefined, sparse, quantized, or safetensors has no such dtype.
class HostCopy {
 public:
  enum class What {
    everything,
    elsewhere,  // only what is not yet in the host's memory in the form that is written
  };
  // Copies the parts; done when it returns.
  void take(std::span<const mesh::HeldTensor> tensors, std::span<const WrittenPart> parts,
            What what = What::everything);

  // Valid until the next take(), and as long as the tensors that were not copied.
  const std::vector<PieceInMemory>& pieces() const { return pieces_; }

  // The memory of the copies: piece after piece, each of which takes room_for() its bytes.
  at::Tensor bytes() const;
  static std::int64_t room_for(std::int64_t bytes);
  // All memory that this object has, which earlier, larger copies may have needed.
  std::int64_t memory_bytes() const { return memory_.defined() ? memory_.numel() : 0; }

 private:
  at::Tensor memory_;  // bytes
  std::int64_t copied_bytes_ = 0;
  std::vector<PieceInMemory> pieces_;
};

using StoredTensors = std::map<std::string, TensorRecord>;

// Says which of the tensors are not stored, or have another shape or type; empty where all fit.
std::string fit_fault(const StoredTensors& stored, std::span<const mesh::HeldTensor> tensors);

// The memory that a tensor's bytes are read into: its own where that is on the host and dense,
// otherwise a copy on the host. The tensor must outlive this object.
class HeldBytes {
 public:
  explicit HeldBytes(const mesh::HeldTensor& tensor);

  // Whether they are the tensor's own memory.
  bool direct() const { return host_.is_same(tensor_.values); }
  // All bytes, in the order of the placement.
  std::span<std::byte> span() const;
  // Moves the bytes where they belong, once they are filled.
  void finish();

 private:
  const mesh::HeldTensor& tensor_;
  at::Tensor host_;
};

// Reads into the tensors, to the bit and without a conversion. Failure: as CheckpointReader; some
// tensors may have been read by then.
void load_held(CheckpointReader& reader, std::span<const mesh::HeldTensor> tensors);

}  // namespace lockstep::checkpoint
