// One copy of a job's state in the memory of its ranks, as far as a process has it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/checkpoint/held_tensors.h>

namespace lockstep {

// What each rank of a job copies: a block of bytes, piece after piece.
using Blocks = std::vector<std::vector<checkpoint::HeldPiece>>;

std::int64_t room_in_block(const checkpoint::HeldPiece& piece);
std::int64_t block_bytes(const std::vector<checkpoint::HeldPiece>& pieces);

struct Snapshot {
  std::int64_t step = 0;
  std::string id;     // of this copy: one of the same step, of ranks formed anew, is another
  std::string state;  // a checkpoint::TrainingState
  std::shared_ptr<const Blocks> blocks;
  std::uint64_t order = 0;  // of the copies of this process; 0: holds nothing

  checkpoint::HostCopy own;
  std::optional<int> own_block;
  at::Tensor received;
  std::optional<int> received_block;
  // Something may still read or write the memory.
  bool is_abandoned = false;

  // Holds nothing then; the memory stays, unless it is abandoned.
  void clear();
  std::vector<int> held_blocks() const;
  // Of one that is held.
  std::span<const std::byte> block(std::int64_t number) const;
};

// What ranks that come new are told of it: its state and blocks.
std::string to_text(const Snapshot& snapshot);

}  // namespace lockstep
