// The state of a job in the memory of its own processes: each rank keeps what it would write of a
// checkpoint and what a neighbour would, so that one lost rank, or one lost host, costs at most the
// steps since the last copy.
//
//   auto copies = std::make_shared<PeerCopies>();   // of the process: outlives a lost rank
//   …  join, make model and optimizer …
//   if (const auto state = copies->restore(ranks, tensors)) …   // otherwise from the disk
//   …  steps, and after each: copies->take(ranks, contents);
//   …  a rank is lost; the job is formed anew, and does the same again
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/recovery/checkpointer.h>

namespace lockstep {

// The rank that keeps each rank's copy; every rank keeps one. Keepers are on other hosts wherever
// that can be: where one host has more than half of the ranks, some copies stay on it. A single
// rank keeps its own.
std::vector<int> keepers(const std::vector<std::string>& host_of_rank);

struct PeerCopiesOptions {
  // Ranks of equal texts may be lost together: copies go to ranks of another one, where there are
  // any. Empty: the host that the process is on.
  std::string lost_together = {};
};

// Every process makes one, before it joins its job, and keeps it while the job is formed anew. All
// ranks call the same functions at the same points; a process that comes new holds nothing, and
// takes part.
//
// Two copies are kept in turn: the older one is good until the newer is complete on all ranks. Each
// takes the memory of the rank's share of the state (replicas share it out, as in a checkpoint) and
// of its neighbour's.
//
// Ownership: keeps a group of its own, split off the ranks it is called with, until it is called
// with others or leave() is called; never those ranks themselves. Threading: one thread. Failure:
// CommError, after which what is held stays; UsageError on all ranks where contents cannot be
// copied or do not fit.
class PeerCopies {
 public:
  explicit PeerCopies(PeerCopiesOptions options = {});
  ~PeerCopies();
  PeerCopies(const PeerCopies&) = delete;
  PeerCopies& operator=(const PeerCopies&) = delete;

  // Waits for the copy before, returns once this rank's share is copied, and sends it to the
  // neighbour meanwhile. (Where the backend takes only tensors of a device, it is sent by then:
  // calls of two groups must not meet there.) Files of the contents are left out. The first call
  // among new ranks, without a restore(), forgets what was held.
  void take(const RankMessages& ranks, const CheckpointContents& contents);
  // Waits until the last copy is with the neighbour.
  void finish();

  // The step of the newest copy of which the ranks hold all; nothing where there is none.
  std::optional<std::int64_t> newest_step(const RankMessages& ranks);

  // Fills the tensors from that one, in whatever layout, each rank its own, and gives the rest of
  // what was copied; as load_checkpoint(). Each rank reads what it has and is sent what it has not.
  // Nothing, on all ranks, where there is none. Other copies are forgotten.
  std::optional<checkpoint::TrainingState> restore(const RankMessages& ranks,
                                                   const std::vector<mesh::HeldTensor>& tensors,
                                                   const LoadOptions& options = {});
  // The same for what state_of() gave of a model and its optimizer.
  std::optional<checkpoint::TrainingState> restore(DistributedManager& dist, const ModelRef& model,
                                                   optim::Optimizer& optimizer,
                                                   std::vector<mesh::HeldTensor> where_there = {});

  // Holds nothing any more; the memory stays for the next copies.
  void forget();
  // Ends what is under way among the ranks it was called with last; what is held stays.
  void leave();

  // The memory that it takes.
  std::int64_t bytes_held() const;
  // Bytes of copies that were sent to the neighbour, so far.
  std::int64_t bytes_sent() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep

namespace lockstep::names {

using lockstep::PeerCopies;
using lockstep::PeerCopiesOptions;

}  // namespace lockstep::names
