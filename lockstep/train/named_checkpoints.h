// Checkpoints that a program asks for, in folders that it names: those without a tag, and one for
// each tag.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include <lockstep/distributed/distributed.h>
#include <lockstep/recovery/checkpointer.h>

namespace lockstep::train {

struct NamedSaveOptions {
  int keep = 0;  // checkpoints without a tag that stay, this one among them; 0: all
  // Training goes on while a copy is written: poll() or finish() gives the result.
  bool asynchronous = false;
  std::shared_ptr<const FolderLock> lock = {};  // as CheckpointerOptions has it
};

// Every rank makes one and calls the same functions at the same points. The file `latest` in a
// folder names what was saved there last: a checkpoint or, as DeepSpeed's does, a tag.
//
// Ownership: shares the job. Threading: one thread. Failure: UsageError on all ranks if a
// checkpoint cannot be written or found; those that are there stay.
class NamedCheckpoints {
 public:
  explicit NamedCheckpoints(DistributedManager dist) : dist_(std::move(dist)) {}

  // Saves into `folder`, or into folder/<tag> in place of what that tag had, and returns where the
  // checkpoint is, or will be. Waits for a save that is under way.
  std::filesystem::path save(const std::filesystem::path& folder, const std::string& tag,
                             const CheckpointContents& contents,
                             const NamedSaveOptions& options = {});
  // These throw if the asynchronous save has failed.
  void poll();
  void finish();

  // The checkpoint of a tag, or the one that was saved last; empty where the folder has none. The
  // folder may be a checkpoint itself.
  std::filesystem::path find(const std::filesystem::path& folder, const std::string& tag) const;

 private:
  struct Naming;

  void heed(const SaveResult& saved);

  DistributedManager dist_;
  std::shared_ptr<Naming> naming_;  // of the save under way
  std::unique_ptr<Checkpointer> under_way_;
};

// The state that a checkpoint has, read by the main rank before any tensor is touched.
checkpoint::TrainingState read_state(const DistributedManager& dist,
                                     const std::filesystem::path& checkpoint);
// A file that is beside its tensors; `otherwise` where there is none of the name.
std::string read_file(const DistributedManager& dist, const std::filesystem::path& checkpoint,
                      const std::string& name, const std::string& otherwise);

}  // namespace lockstep::train
