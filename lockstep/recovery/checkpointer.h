// Saves what a job trains, and loads it again in any layout: every rank writes what it has, once,
// while training goes on.
//
//   Checkpointer checkpoints(dist, "run/checkpoints", {.keep_last = 3});
//   checkpoints.save({.tensors = state_of(dist, model, *adamw), .state = {.step = step}});
//   …  steps …
//   if (const auto saved = checkpoints.poll()) …   // every rank, at the same points
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/folder_lock.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/optim/optimizer.h>

namespace lockstep {

// The contents of a checkpoint.
struct CheckpointContents {
  // This rank's parts, under names of the whole job: a name has the same shape and type everywhere.
  std::vector<mesh::HeldTensor> tensors = {};
  checkpoint::TrainingState state = {};  // its step names the checkpoint; the main rank's counts
  // File name to text, as config.json, of the main rank.
  std::map<std::string, std::string> files = {};
};

// A model's tensors as "model/<name>", an optimizer's as "optimizer/<name>".
std::vector<mesh::HeldTensor> state_of(DistributedManager& dist, const ModelRef& model,
                                       const optim::Optimizer& optimizer);

// The result of a save.
struct SaveResult {
  std::int64_t step = 0;
  std::filesystem::path path;  // empty where it failed
  std::string error;           // what failed, on whichever rank; empty where nothing did

  bool ok() const { return error.empty(); }
};

struct CheckpointerOptions {
  int keep_last = 0;  // complete checkpoints that stay once a new one is there; 0: all
  // The main rank's, where the program holds one that keeps others out of the folder: no save
  // touches a folder that a later generation of the job has taken over. Without one, each save
  // takes a lock of its own, which a process that hangs in it keeps from all others.
  std::shared_ptr<const FolderLock> lock = {};
  // Called on the main rank for each checkpoint that is complete, by the thread that wrote it. What
  // it throws as a FileError is a warning.
  std::function<void(std::int64_t step)> committed = {};
};

// Every rank makes one and calls its functions at the same points of its program. The folder is one
// that all ranks see.
//
// A checkpoint is complete or not there: its files come under a hidden name, and get theirs when
// every rank's are on disk. One save at a time; another waits for it. What it writes is copied
// first, in save(), so that training may go on; that takes as much memory again as the rank writes,
// from the first save on.
//
// A save has three parts, each of which all ranks end before the next begins, at a poll() or in
// finish(): the main rank makes a folder, every rank writes, the main rank commits and removes old
// ones, or where one failed what there is of the new one. A thread of the rank's does them, which
// computing comes before; no call of training's waits for a disk.
//
// Ownership: shares the ranks' group. Threading: one thread; writes on one of its own. Failure: a
// disk that is full, read-only or gone is no exception but a SaveResult with the error, the same on
// every rank, and leaves every older checkpoint as it was; UsageError on all ranks where the
// contents cannot be saved at all; CommError.
class Checkpointer {
 public:
  Checkpointer(RankMessages ranks, std::filesystem::path folder, CheckpointerOptions options = {});
  Checkpointer(const DistributedManager& dist, std::filesystem::path folder,
               CheckpointerOptions options = {})
      : Checkpointer(RankMessages(dist.world()), std::move(folder), std::move(options)) {}
  // Drops a save that is not complete: a rank that leaves a generation must not wait for a disk.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // Returns once the contents are copied. UsageError where another save is still under way: poll()
  // or finish() says what came of it.
  void save(const CheckpointContents& contents);

  // The same without a copy of what is in the host's memory already; waits until it is on disk.
  SaveResult save_and_wait(const CheckpointContents& contents);

  bool under_way() const;
  // The result, once it is complete; nothing before, or where none is under way.
  std::optional<SaveResult> poll();
  // Waits for the save that is under way.
  SaveResult finish();

  // The bytes of this rank's tensors that it wrote in the last save.
  std::int64_t bytes_written() const;

 private:
  struct State;

  std::unique_ptr<State> state_;
};

// Throws what save() would, and writes nothing: for before a run computes what it could not save.
void check_contents(const CheckpointContents& contents);

struct LoadOptions {
  // Prefixes of names ("model/") below which the checkpoint may have nothing that no rank wants.
  std::vector<std::string> complete = {};
  // Filled where the checkpoint has them, of this shape and type; otherwise left as they are.
  std::vector<mesh::HeldTensor> where_there = {};
};

// Fills the tensors from a checkpoint of any layout, each rank its own, and gives the rest of what
// was saved. Nothing is touched unless all of it fits on every rank. Every rank calls it.
//
// Failure, the same on every rank: UsageError where a tensor is missing, or of another shape or
// type, or the checkpoint has more than it may; checkpoint::DamagedCheckpoint, with the file and
// the tensor, where something is not as it was written: then some tensors have been filled, and an
// older checkpoint can be loaded.
checkpoint::TrainingState load_checkpoint(const RankMessages& ranks,
                                          const std::filesystem::path& checkpoint,
                                          const std::vector<mesh::HeldTensor>& tensors,
                                          const LoadOptions& options = {});

// The same for what state_of() gave of them, all of which must be theirs.
checkpoint::TrainingState load_checkpoint(DistributedManager& dist,
                                          const std::filesystem::path& checkpoint,
                                          const ModelRef& model, optim::Optimizer& optimizer,
                                          std::vector<mesh::HeldTensor> where_there = {});

namespace internal {

// The same tensors with a prefix before their names.
std::vector<mesh::HeldTensor> below(const std::string& prefix,
                                    std::vector<mesh::HeldTensor> tensors);

// Has `load` fill what state_of() gives of a model and its optimizer, and tells both.
checkpoint::TrainingState load_state_of(
    DistributedManager& dist, const ModelRef& model, optim::Optimizer& optimizer,
    std::vector<mesh::HeldTensor> where_there,
    const std::function<checkpoint::TrainingState(const std::vector<mesh::HeldTensor>& tensors,
                                                  const LoadOptions& options)>& load);

}  // namespace internal

}  // namespace lockstep

namespace lockstep::names {

using lockstep::CheckpointContents;
using lockstep::Checkpointer;
using lockstep::CheckpointerOptions;
using lockstep::load_checkpoint;
using lockstep::state_of;

}  // namespace lockstep::names
