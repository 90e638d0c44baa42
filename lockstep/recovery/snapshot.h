// A copy of a job's state in the memory of its ranks: what a process holds of it, the bytes that
// ranks ask each other for, and how a rank's tensors are filled from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/checkpoint/held_tensors.h>
#include <lockstep/distributed/rank_messages.h>

namespace lockstep {

// Each rank of a job copies a block of bytes, piece after piece.
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
  // The bytes of a block that is held.
  std::span<const std::byte> block(std::int64_t number) const;
};

// The state and the blocks of a copy, for ranks that come new.
std::string to_text(const Snapshot& snapshot);

// A part of a block of bytes that a rank has under a number.
struct BlockStretch {
  std::int64_t block = 0;
  std::int64_t offset = 0;
  std::int64_t bytes = 0;
};

struct FetchOptions {
  // A rank's bytes on their way at once, about: as many again come.
  std::int64_t bytes_at_once = 64 << 20;
};

// Ranks send each other the bytes that they ask for, a bounded part at a time. wanted[r] is what
// this rank asks of rank r, nothing of itself. `held` gives the bytes of one of
// this rank's blocks. `take` is called as bytes come: with the rank, the place of the stretch among
// those asked of it, how many of its bytes came before, and these. Every rank calls it; only what
// is asked for is sent.
void fetch_stretches(const RankMessages& ranks,
                     const std::vector<std::vector<BlockStretch>>& wanted,
                     const std::function<std::span<const std::byte>(std::int64_t block)>& held,
                     const std::function<void(int rank, std::size_t index, std::int64_t before,
                                              std::span<const std::byte> bytes)>& take,
                     const FetchOptions& options = {});

// A copy of which the ranks together hold every block.
struct WholeCopy {
  std::int64_t step = 0;
  std::string id;
  std::vector<std::vector<int>> holders;  // of each block
};

// Where the pieces of a copy's tensors are.
struct StoredPieces {
  struct Place {
    std::int64_t block = 0;
    std::int64_t offset = 0;
  };
  checkpoint::StoredTensors tensors;
  std::map<std::string, std::vector<Place>> places;

  explicit StoredPieces(const Blocks& blocks);
};

// Fills a rank's tensors from a copy: what the rank holds of the blocks comes from its own memory,
// the rest from the others.
class SnapshotFilling {
 public:
  // UsageError where the tensors cannot be filled; nothing is touched yet.
  SnapshotFilling(const StoredPieces& stored, const WholeCopy& copy,
                  const std::vector<const mesh::HeldTensor*>& tensors, int rank, int num_ranks);

  // Every rank calls it. `snapshot` is this rank's; null where it holds nothing.
  void fill(const RankMessages& ranks, const Snapshot* snapshot);

 private:
  struct Here {
    BlockStretch stretch;
    std::int64_t into = 0;
  };
  struct OneTensor {
    const mesh::HeldTensor* tensor = nullptr;
    std::vector<Here> here;
    std::int64_t missing_bytes = 0;
    // Only from its first byte to its last: where it takes memory, few tensors do at once.
    std::optional<checkpoint::HeldBytes> bytes;
  };
  struct Goal {
    std::size_t tensor = 0;
    std::int64_t into = 0;
  };

  static void put(OneTensor& one, std::int64_t into, std::span<const std::byte> bytes);
  static void finish(OneTensor& one, const Snapshot* snapshot);

  std::vector<OneTensor> tensors_;
  std::vector<std::vector<BlockStretch>> wanted_;  // of each rank
  std::vector<std::vector<Goal>> goals_;           // of each of those
};

}  // namespace lockstep
