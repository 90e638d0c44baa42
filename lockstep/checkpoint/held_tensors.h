// The parts of tensors that a rank holds: their copies on the host, which a checkpoint is written
// from while the tensors change, and how they are filled from a checkpoint.
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

// The descriptions of the tensors that a rank sends to the others.
std::vector<HeldPiece> held_pieces(std::span<const mesh::HeldTensor> tensors);

// A copy in the host's memory of the parts that a rank writes, because the tensors may change while
// they are written.
//
// Ownership: owns its memory and keeps it for the next time; the memory is pinned if the tensors
// are on a GPU. Threading: one thread at a time. Failure: UsageError, with the tensor's name, if it
// is undefined, sparse or quantized, or if safetensors has no such dtype.
class HostCopy {
 public:
  enum class What {
    everything,
    // only tensors that are not in the host's memory in the form in which they are written
    elsewhere,
  };
  // Copies the parts; the copy is complete when this returns.
  void take(std::span<const mesh::HeldTensor> tensors, std::span<const WrittenPart> parts,
            What what = What::everything);

  // Valid until the next take(), and as long as the tensors that were not copied.
  const std::vector<PieceInMemory>& pieces() const { return pieces_; }

  // The memory of the copies: piece after piece, each of which takes room_for(its bytes).
  at::Tensor bytes() const;
  static std::int64_t room_for(std::int64_t bytes);
  // All memory that this object holds; earlier copies may have been larger.
  std::int64_t memory_bytes() const { return memory_.defined() ? memory_.numel() : 0; }

 private:
  at::Tensor memory_;  // a tensor of bytes
  std::int64_t copied_bytes_ = 0;
  std::vector<PieceInMemory> pieces_;
};

using StoredTensors = std::map<std::string, TensorRecord>;

// Names the tensors that the checkpoint lacks, or has in another shape or type; empty if all fit.
std::string fit_fault(const StoredTensors& stored, std::span<const mesh::HeldTensor> tensors);

// The memory that a tensor's bytes are read into: the tensor's own if that is on the host and
// dense, otherwise a copy on the host. The tensor must outlive this object.
class HeldBytes {
 public:
  explicit HeldBytes(const mesh::HeldTensor& tensor);

  // Whether this is the tensor's own memory.
  bool direct() const { return host_.is_same(tensor_.values); }
  // All bytes, in the order of the placement.
  std::span<std::byte> span() const;
  // Copies the bytes to the tensor, if they are not in its memory already.
  void finish();

 private:
  const mesh::HeldTensor& tensor_;
  at::Tensor host_;
};

// Reads into the tensors, to the bit and without a conversion. Failure: as CheckpointReader; some
// tensors may already have been read then.
void load_held(CheckpointReader& reader, std::span<const mesh::HeldTensor> tensors);

}  // namespace lockstep::checkpoint
