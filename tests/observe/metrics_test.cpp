#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include <lockstep/base/durable_file.h>
#include <lockstep/observe/appended_file.h>
#include <lockstep/observe/metrics.h>

namespace lockstep::observe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

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

class DiskFull : public MetricSink {
 public:
  void record(std::int64_t step, std::span<const Metric>) override {
    if (step >= 2) throw FileError("cannot write 'm.csv': No space left on device");
  }
  void flush() override {}
};

TEST(Metrics, GoToEverySinkAndOneThatFailsIsDroppedWithOneWarning) {
  std::vector<std::string> first;
  std::vector<std::string> last;
  Metrics metrics;
  metrics.add(std::make_unique<Recorded>(first));
  metrics.add(std::make_unique<DiskFull>());
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
  EXPECT_THAT(warnings, HasSubstr("'m.csv': No space left on device; training goes on"));
  EXPECT_EQ(std::ranges::count(warnings, '\n'), 1);
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
