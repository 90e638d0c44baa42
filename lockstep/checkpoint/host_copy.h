// What a rank writes of its tensors, copied to the host: the tensors may change while it is
// written.
#pragma once

#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/checkpoint/format/piece_file.h>
#include <lockstep/checkpoint/format/shares.h>
#include <lockstep/mesh/held_tensor.h>

namespace lockstep::checkpoint {

// What others are told of the tensors.
std::vector<HeldPiece> held_pieces(std::span<const mesh::HeldTensor> tensors);

// Ownership: memory of its own, which stays for the next time; pinned where the tensors are on a
// GPU. Threading: one thread at a time. Failure: UsageError that names the tensor where it is
// undefined, sparse, quantized, or safetensors has no such dtype.
class HostCopy {
 public:
  enum class What {
    everything,
    elsewhere,  // what is not in the host's memory as it is to be written; the rest stays where it
                // is
  };
  // Copies the parts; done when it returns.
  void take(std::span<const mesh::HeldTensor> tensors, std::span<const WrittenPart> parts,
            What what = What::everything);

  // Valid until the next take(), and as long as what was not copied.
  const std::vector<PieceInMemory>& pieces() const { return pieces_; }

  // The memory of what was copied: piece after piece, each with so much room.
  at::Tensor bytes() const;
  static std::int64_t room_for(std::int64_t bytes);
  // All that it takes, also of larger ones before.
  std::int64_t memory_bytes() const { return memory_.defined() ? memory_.numel() : 0; }

 private:
  at::Tensor memory_;  // bytes
  std::int64_t copied_bytes_ = 0;
  std::vector<PieceInMemory> pieces_;
};

}  // namespace lockstep::checkpoint
