// Whether a run can go on from the checkpoint that its config leads to: found out without LibTorch
// and before any rank starts.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/base/folder_lock.h>
#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/data/tokens/sequences.h>
#include <lockstep/train/config/config.h>
#include <lockstep/train/preflight/run_plan.h>

namespace lockstep::train {

// The config's choice of where a run begins.
struct Beginning {
  Resume resume = Resume::automatic;
  std::filesystem::path from = {};
};

// The checkpoints in a run's folder that it may resume from, ascending by step. A run that an
// earlier generation of its job has begun, in the state `start` (run_start.h), resumes from
// checkpoints that were written since, wherever it began. UsageError where a run that begins now
// finds checkpoints of later steps than its first: only the newest are kept, which would be the
// other run's, and its own would be lost.
std::vector<checkpoint::Checkpoint> to_go_on_from(
    const std::filesystem::path& output, const Beginning& told,
    const std::optional<checkpoint::TrainingState>& start);

// Call this where none of them is whole, before the run begins where its config says: UsageError
// where later steps have been saved in its folder. However those checkpoints were lost (damaged,
// set aside, removed), trained steps are not repeated in silence; a user who wants a new run gives
// it a folder of its own.
void check_nothing_lost(const std::filesystem::path& output, const Beginning& told,
                        const std::optional<checkpoint::TrainingState>& start);

// The step of the run's newest checkpoint where that is gone (removed, or on a disk that is not
// mounted): its folder has neither that one nor a later one, with damaged and set aside ones
// counted. UsageError where saved.json cannot be read.
std::optional<std::int64_t> newest_is_gone(const std::filesystem::path& output);

// The checkpoint that the run goes on from in the generation `now`, the newest that is not damaged
// as far as its files' names, sizes and beginnings tell; none where it starts from nothing.
// UsageError as both above.
std::optional<std::filesystem::path> checkpoint_to_resume(const TrainConfig& config,
                                                          const FolderHolder& now);

// UsageError that names every setting that makes the checkpoint's run another one, or the damaged
// file, and the way out. Tensors are checked only when they are read. Returns the allowed
// differences that there are, for the log: "the learning rate is 0.001, was 0.01".
std::vector<std::string> check_resume(const TrainConfig& config, const ResolvedRun& run,
                                      const FolderHolder& now = {});

// How to resume a run that has a checkpoint of that step, as the end of a sentence for the user.
std::string how_to_go_on(const TrainConfig& config, std::int64_t step);

// The file of a checkpoint that holds the digest of its data.
inline constexpr const char* kDataFile = "data.json";

// A digest of a run's training data: kept in its checkpoints, and compared when the run goes on.
struct DataDigest {
  std::int64_t num_tokens = 0;
  // A checksum of the first tokens, the last, and blocks at even distances between: as quick for a
  // terabyte as for a megabyte. Small files are read whole; in large ones a change may lie between
  // the blocks.
  std::uint32_t crc32c = 0;

  bool operator==(const DataDigest&) const = default;
};

DataDigest digest(const data::TokenStream& stream);

std::string to_text(const DataDigest& digest);

// UsageError that names `file` where the text is no digest.
DataDigest parse_digest(std::string_view text, const std::string& file);

}  // namespace lockstep::train
