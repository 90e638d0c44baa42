#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include <lockstep/base/durable_file.h>
#include <lockstep/observe/metrics.h>

#include "../base/files.h"
#include "../checkpoint/tiny_disk.h"

namespace lockstep::observe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class Recorded : public MetricSink {
 public:
  explicit Recorded(std::vector<std::string>& lines) : lines_(lines) {}
  void record(std::int64_t step, std::span<const Metric> metrics) override {
    std::string line = std::to_string(step);
    for (const auto& metric : metrics) line += fmt::format(" {}={}", metric.name, metric.value);
    lines_.push_back(line);
  }
  void flush() override { lines_.emplace_back("flush"); }

 private:
  std::vector<std::string>& lines_;
};

class FullForAWhile : public MetricSink {
 public:
  explicit FullForAWhile(std::vector<std::string>& lines) : lines_(lines) {}
  void record(std::int64_t step, std::span<const Metric>) override {
    if (step == 2 || step == 3) throw FileError("cannot write 'm.csv': No space left on device");
    lines_.push_back(std::to_string(step));
  }
  void flush() override {}

 private:
  std::vector<std::string>& lines_;
};

TEST(Metrics, ADiskThatIsFullForAWhileIsTriedAgainWithOneWarning) {
  std::vector<std::string> lines;
  Metrics metrics;
  metrics.add(std::make_unique<FullForAWhile>(lines));
  ::testing::internal::CaptureStderr();
  for (std::int64_t step = 1; step <= 5; ++step) metrics.record(step, {{"loss", 2.5}});
  const std::string warnings = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(lines, ElementsAre("1", "4", "5"));
  EXPECT_THAT(warnings, HasSubstr("'m.csv': No space left on device; training goes on"));
  const auto first = warnings.find("No space left");
  EXPECT_EQ(warnings.find("No space left", first + 1), std::string::npos) << warnings;
}

class Refuses : public MetricSink {
 public:
  void record(std::int64_t step, std::span<const Metric>) override {
    if (step >= 2) throw UsageError("a metric cannot be called 'x y'");
  }
  void flush() override {}
};

TEST(Metrics, GoToEverySinkAndOneThatCannotHoldThemIsDroppedWithOneWarning) {
  std::vector<std::string> first;
  std::vector<std::string> last;
  Metrics metrics;
  metrics.add(std::make_unique<Recorded>(first));
  metrics.add(std::make_unique<Refuses>());
  metrics.add(std::make_unique<Recorded>(last));

  ::testing::internal::CaptureStderr();
  metrics.record(1, {{"loss", 2.5}});
  EXPECT_EQ(metrics.num_sinks(), 3u);
  metrics.record(2, {{"loss", 2.25}, {"learning_rate", 0.5}});
  metrics.record(3, {{"loss", 2}});
  metrics.flush();
  const std::string warnings = ::testing::internal::GetCapturedStderr();

  EXPECT_EQ(metrics.num_sinks(), 2u);
  EXPECT_THAT(first,
              ElementsAre("1 loss=2.5", "2 loss=2.25 learning_rate=0.5", "3 loss=2", "flush"));
  EXPECT_EQ(first, last);
  EXPECT_THAT(warnings, HasSubstr("cannot be called 'x y'; training goes on"));
  EXPECT_EQ(std::ranges::count(warnings, '\n'), 1);
}

// Takes nothing while its disk is full, and can keep one record.
struct OnAFullDisk : MetricSink {
  explicit OnAFullDisk(const bool& is_full) : full(is_full) {}
  void record(std::int64_t, std::span<const Metric>) override {
    if (full && kept) ++lost;
    kept = full;
    flush();
  }
  void flush() override {
    if (full) throw FileError("the disk is full");
  }
  std::size_t num_lost() const override { return lost; }

  const bool& full;
  bool kept = false;
  std::size_t lost = 0;
};

TEST(Metrics, WhatAFullDiskCostsIsSaid) {
  bool full = false;
  Metrics metrics;
  metrics.add(std::make_unique<OnAFullDisk>(full));
  const auto warned = [&](bool is_full, const auto& action) {
    full = is_full;
    ::testing::internal::CaptureStderr();
    action();
    return ::testing::internal::GetCapturedStderr();
  };
  const auto record = [&] { metrics.record(1, {{"loss", 2}}); };
  const auto flush = [&] { metrics.flush(); };
  EXPECT_EQ(warned(false, record), "");
  EXPECT_THAT(warned(true, record), HasSubstr("the disk is full; training goes on"));
  EXPECT_EQ(warned(true, record), "");
  EXPECT_THAT(warned(true, flush), HasSubstr("what waits is lost should the run end now"));
  EXPECT_THAT(warned(false, record), HasSubstr("written again; 1 records are lost"));
  EXPECT_EQ(warned(false, record), "");
  warned(true, record);
  EXPECT_THAT(warned(false, record), Not(HasSubstr("lost")));
}

TEST(AppendedFile, RecordsThatThereIsNoRoomToKeepAreCounted) {
  const lockstep::testing::TinyDisk disk("8k");
  if (!disk.mounted()) GTEST_SKIP() << "mounting a disk needs root";
  AppendedFile file(disk / "records", AppendedFile::Existing::append);
  lockstep::testing::write_file(disk / "other", std::string(64 << 10, 'x'));
  const std::string record(400 << 10, 'r');
  for (int i = 0; i < 5; ++i) EXPECT_THROW(file.append(record), FileError);
  EXPECT_EQ(file.num_lost(), 3u) << "two are within a megabyte";
}

TEST(AppendedFile, AFullDiskIsAFileErrorThatNamesTheFile) {
  AppendedFile file("/dev/full", AppendedFile::Existing::append);
  try {
    file.append("a record");
    FAIL() << "nothing was thrown";
  } catch (const FileError& error) {
    EXPECT_THAT(error.what(), HasSubstr("cannot write '/dev/full': No space left"));
  }
}

}  // namespace
}  // namespace lockstep::observe
