// Metrics as TensorBoard reads them: `tensorboard --logdir <folder>`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>

#include <lockstep/observe/metrics.h>

namespace lockstep::observe {

// A new event file in a folder, events.out.tfevents.<time>.<host>.<pid>.<number>: TensorBoard takes
// all files of a folder as one run. A record is with the kernel when record() returns, and on disk
// when flush() does; one that a kill tore is skipped by TensorBoard.
//
// Threading: one thread. Failure: FileError naming the file.
class TensorBoardFile : public MetricSink {
 public:
  // With `resume_after`, TensorBoard forgets later steps in earlier files of the folder, because
  // the resumed run writes them again.
  explicit TensorBoardFile(const std::filesystem::path& folder,
                           std::optional<std::int64_t> resume_after = std::nullopt);

  void record(std::int64_t step, std::span<const Metric> metrics) override;
  void flush() override { file_.sync(); }
  std::size_t num_lost() const override { return file_.num_lost(); }

  const std::filesystem::path& path() const { return file_.path(); }

 private:
  void write(std::string_view event);

  AppendedFile file_;
};

}  // namespace lockstep::observe
