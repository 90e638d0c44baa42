// Fills a rank's tensors from a copy in the memory of all ranks.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <lockstep/checkpoint/held_tensors.h>
#include <lockstep/distributed/fetch_stretches.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/distributed/snapshot.h>

namespace lockstep {

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

// What it holds of the blocks it takes from there, and others send it the rest.
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
