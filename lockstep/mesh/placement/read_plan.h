// The reads that fill the part of a tensor that a rank is to hold, from the parts that others hold:
// for loading a checkpoint of another layout, gathering, re-sharding. All numbers count elements;
// the caller knows their bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <lockstep/mesh/placement/placement.h>

namespace lockstep::mesh {

struct Read {
  int holder = 0;                       // index into the holders
  std::int64_t source_offset = 0;       // in the holder's storage
  std::int64_t destination_offset = 0;  // in mine
  std::int64_t count = 0;

  bool operator==(const Read&) const = default;
};

// Elements of a storage that lie together.
struct Stretch {
  std::int64_t offset = 0;
  std::int64_t count = 0;

  bool operator==(const Stretch&) const = default;
};

struct ReadPlan {
  std::vector<Read> reads;                  // ascending in destination, no element twice
  std::vector<Stretch> missing;             // stretches of my storage that nobody holds
  std::vector<std::int64_t> elements_from;  // for each holder

  bool complete() const { return missing.empty(); }

  // UsageError that says what nobody holds; `tensor` is its name. Nothing where all is there.
  void check_complete(const std::string& tensor, const Placement& mine) const;
};

struct ReadOptions {
  // The number of this reader among the ranks that read from the same holders. Where several hold
  // the same elements, different readers begin with different holders.
  int reader = 0;
  // A holder that costs nothing to read (this rank itself, a local disk): taken wherever it can.
  std::optional<int> local;
  // Stretches shorter than this are not divided among replicas.
  std::int64_t smallest_piece = 1 << 16;
};

// Covers every element of `mine` that someone holds exactly once. Replicas share the load about
// evenly; the plan depends on nothing but the arguments. UsageError where a holder is of another
// shape.
ReadPlan plan_reads(const Placement& mine, std::span<const Placement> holders,
                    const ReadOptions& options = {});

// The stretches of `mine`'s storage that none of `others` holds, ascending. Where each element must
// count once, as in a norm, `others` are the ranks before this one, and the rank answers for these
// stretches.
std::vector<Stretch> held_by_none(const Placement& mine, std::span<const Placement> others);

}  // namespace lockstep::mesh
