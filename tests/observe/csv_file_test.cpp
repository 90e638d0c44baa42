#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include <lockstep/base/durable_file.h>
#include <lockstep/observe/csv_file.h>

#include "../base/errors.h"
#include "../base/files.h"
#include "../checkpoint/tiny_disk.h"

namespace lockstep::observe {
namespace {

using lockstep::testing::read_file;
using lockstep::testing::TemporaryFolder;
using lockstep::testing::write_file;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

void record(CsvFile& file, std::int64_t step, std::vector<Metric> metrics) {
  file.record(step, metrics);
}

// A run that logs each step and validates every third.
void train(CsvFile& file, std::int64_t from, std::int64_t to) {
  for (std::int64_t step = from; step <= to; ++step) {
    std::vector<Metric> metrics = {{"loss", 1.0 / static_cast<double>(step)}};
    if (step % 3 == 0) metrics.push_back({"accuracy", 0.1 * static_cast<double>(step)});
    file.record(step, metrics);
  }
}

TEST(CsvFile, HasACellForEachColumnAndLeavesEmptyWhatWasNotGiven) {
  const TemporaryFolder folder;
  CsvFile file(folder / "metrics.csv", {.columns = {"loss", "validation_loss"}});
  record(file, 1, {{"loss", 2.5}});
  record(file, 2, {{"validation_loss", 3}, {"loss", 0.1}});
  record(file, 3, {});
  EXPECT_EQ(read_file(folder / "metrics.csv"), "step,loss,validation_loss\n1,2.5,\n2,0.1,3\n3,,\n");
}

TEST(CsvFile, StartsWithTheTrainersColumnsInAFolderItMakes) {
  const TemporaryFolder folder;
  CsvFile file(folder / "run" / "metrics.csv");
  EXPECT_EQ(read_file(folder / "run" / "metrics.csv"),
            "step,loss,validation_loss,learning_rate,gradient_norm,tokens_per_second,seconds\n");
}

TEST(CsvFile, NumbersReadBackAsTheSameDoubles) {
  const TemporaryFolder folder;
  const auto path = folder / "metrics.csv";
  std::vector<double> values = {0.0,
                                -0.0,
                                0.1,
                                1.0 / 3,
                                static_cast<double>(1.872f),
                                std::numeric_limits<double>::max(),
                                std::numeric_limits<double>::denorm_min(),
                                std::numeric_limits<double>::infinity(),
                                -std::numeric_limits<double>::infinity()};
  std::mt19937_64 random(7);
  while (values.size() < 2000) {
    const auto value = std::bit_cast<double>(random());
    if (std::isfinite(value)) values.push_back(value);
  }
  CsvFile file(path, {.columns = {"loss"}});
  for (const double value : values) record(file, 1, {{"loss", value}});
  record(file, 2, {{"loss", std::numeric_limits<double>::quiet_NaN()}});

  const CsvTable table(path);
  ASSERT_EQ(table.rows().size(), values.size() + 1);
  for (std::size_t i = 0; i < values.size(); ++i)
    EXPECT_EQ(std::bit_cast<std::uint64_t>(CsvTable::value(table.rows()[i], 0).value()),
              std::bit_cast<std::uint64_t>(values[i]));
  EXPECT_TRUE(std::isnan(CsvTable::value(table.rows().back(), 0).value()));
}

TEST(CsvFile, ANewMetricGetsAColumnInEveryRow) {
  const TemporaryFolder folder;
  CsvFile file(folder / "metrics.csv", {.columns = {"loss"}});
  record(file, 1, {{"loss", 2}});
  record(file, 2, {{"accuracy", 0.5}, {"f1/macro", 0.25}});
  record(file, 3, {{"loss", 1}});
  EXPECT_EQ(read_file(folder / "metrics.csv"),
            "step,loss,accuracy,f1/macro\n1,2,,\n2,,0.5,0.25\n3,1,,\n");
  EXPECT_FALSE(std::filesystem::exists(folder / "metrics.csv.part"));
}

TEST(CsvFile, ARunThatResumesLeavesWhatAnUndisturbedOneWrites) {
  const TemporaryFolder folder;
  {
    CsvFile undisturbed(folder / "undisturbed.csv");
    train(undisturbed, 1, 20);
  }
  const std::string expected = read_file(folder / "undisturbed.csv");
  // Killed at any byte of what it wrote after its checkpoint at step 10.
  std::string killed_late;
  {
    CsvFile killed(folder / "killed.csv");
    train(killed, 1, 13);
    killed_late = read_file(folder / "killed.csv");
  }
  for (std::size_t size = killed_late.find("\n11,") + 1; size <= killed_late.size(); ++size) {
    write_file(folder / "killed.csv", killed_late.substr(0, size));
    CsvFile resumed(folder / "killed.csv", {.resume_after = 10});
    train(resumed, 11, 20);
    ASSERT_EQ(read_file(folder / "killed.csv"), expected) << "killed at byte " << size;
  }
}

TEST(CsvFile, WithoutResumeItStartsAnewAndOnResumeWithoutAFileToo) {
  const TemporaryFolder folder;
  write_file(folder / "old.csv", "step,loss\n1,2\n");
  CsvFile anew(folder / "old.csv", {.columns = {"loss"}});
  EXPECT_EQ(read_file(folder / "old.csv"), "step,loss\n");
  CsvFile missing(folder / "missing.csv", {.columns = {"loss"}, .resume_after = 5});
  EXPECT_EQ(read_file(folder / "missing.csv"), "step,loss\n");
  write_file(folder / "empty.csv", "");
  CsvFile empty(folder / "empty.csv", {.columns = {"loss"}, .resume_after = 5});
  EXPECT_EQ(read_file(folder / "empty.csv"), "step,loss\n");
}

// Before a disk is full it takes a part of a row.
TEST(CsvFile, ADiskThatWasFullForAWhileCostsNoRowAndTearsNone) {
  const lockstep::testing::TinyDisk disk("8k");
  if (!disk.mounted()) GTEST_SKIP() << "mounting a disk needs root";
  const TemporaryFolder whole;
  CsvFile undisturbed(whole / "m.csv", {.columns = {"loss", "accuracy"}});
  CsvFile file(disk / "m.csv", {.columns = {"loss", "accuracy"}});
  std::int64_t step = 0;
  const auto both = [&](int num_steps) {
    int num_failed = 0;
    for (const std::int64_t last = step + num_steps; step < last;) {
      train(undisturbed, step + 1, step + 1);
      ++step;
      try {
        train(file, step, step);
      } catch (const FileError&) {
        ++num_failed;
      }
    }
    return num_failed;
  };
  EXPECT_EQ(both(20), 0);
  write_file(disk / "other", std::string(64 << 10, 'x'));  // fills all of the remaining room
  EXPECT_GT(both(200), 0);
  const std::string now = read_file(disk / "m.csv");
  EXPECT_EQ(now.back(), '\n') << "no row is torn";
  EXPECT_TRUE(read_file(whole / "m.csv").starts_with(now));
  std::filesystem::remove(disk / "other");
  EXPECT_EQ(both(5), 0);
  EXPECT_EQ(read_file(disk / "m.csv"), read_file(whole / "m.csv"));
}

TEST(CsvFile, AColumnThatAFullDiskHasNoRoomForCostsNoRow) {
  const lockstep::testing::TinyDisk disk("64k");
  if (!disk.mounted()) GTEST_SKIP() << "mounting a disk needs root";
  CsvFile file(disk / "m.csv", {.columns = {"loss"}});
  write_file(disk / "other", std::string(256 << 10, 'x'));
  std::int64_t step = 0;
  const auto record_next = [&](std::vector<Metric> metrics) { record(file, ++step, metrics); };
  bool fits = true;
  while (fits) {
    try {
      record_next({{"loss", 0.5}});
    } catch (const FileError&) {
      fits = false;
    }
  }
  EXPECT_THROW(record_next({{"loss", 2}, {"accuracy", 0.25}}), FileError);
  std::filesystem::remove(disk / "other");
  record_next({{"loss", 1}, {"accuracy", 0.75}});
  const std::string text = read_file(disk / "m.csv");
  EXPECT_TRUE(text.starts_with("step,loss,accuracy\n1,0.5,\n"));
  EXPECT_TRUE(text.ends_with(fmt::format("{},0.5,\n{},2,\n{},1,0.75\n", step - 2, step - 1, step)))
      << text;
}

TEST(CsvFile, LinesThatAreNoRowsAreLeftOutWithAWarning) {
  const TemporaryFolder folder;
  write_file(folder / "m.csv", std::string("step,loss\n1,2\nrubbish\n2,x\n3,1,9\n") +
                                   std::string(7, '\0') + "\n4,0.5\r\n9,0.1\n5,0.");
  ::testing::internal::CaptureStderr();
  CsvFile file(folder / "m.csv", {.columns = {"loss"}, .resume_after = 5});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("4 lines of"));
  EXPECT_EQ(read_file(folder / "m.csv"), "step,loss\n1,2\n4,0.5\n");
}

TEST(CsvFile, AFileOfSomebodyElseIsRefusedAndUntouched) {
  const TemporaryFolder folder;
  for (const std::string text : {"time,loss\n1,2\n", "step,a b\n", "step,loss,loss\n", "\n", "x"}) {
    write_file(folder / "other.csv", text);
    EXPECT_THAT(usage_error([&] { CsvFile file(folder / "other.csv", {.resume_after = 1}); }),
                HasSubstr("other.csv' is not a metrics file of ours"));
    EXPECT_EQ(read_file(folder / "other.csv"), text);
  }
}

TEST(CsvFile, RefusesNamesThatCannotBeAColumns) {
  const TemporaryFolder folder;
  CsvFile file(folder / "metrics.csv", {.columns = {"loss"}});
  for (const std::string name : {"", "step", "a,b", "a\"b", "a\nb", "ümlaut"})
    EXPECT_THAT(usage_error([&] {
                  record(file, 1, {{name, 1}});
                }),
                HasSubstr("a metric cannot be called '" + name + "'"));
  std::vector<Metric> many;
  many.reserve(1000);
  for (int i = 0; i < 1000; ++i) many.push_back({fmt::format("m{}", i), 1});
  EXPECT_THAT(usage_error([&] { file.record(1, many); }),
              HasSubstr("metric 'm999' would be column 1001"));
  EXPECT_EQ(read_file(folder / "metrics.csv"), "step,loss\n");
}

TEST(CsvFile, AFolderThatCannotBeMadeIsAFileError) {
  const TemporaryFolder folder;
  write_file(folder / "file", "");
  EXPECT_THROW(CsvFile(folder / "file" / "metrics.csv"), FileError);
}

TEST(CsvTable, FindsColumnsByName) {
  const TemporaryFolder folder;
  write_file(folder / "m.csv", "step,loss,validation_loss\n5,,0.25\n-6,inf,\n");
  const CsvTable table(folder / "m.csv");
  EXPECT_THAT(table.columns(), ElementsAre("loss", "validation_loss"));
  EXPECT_EQ(table.column("validation_loss"), 1u);
  EXPECT_EQ(table.column("accuracy"), std::nullopt);
  ASSERT_EQ(table.rows().size(), 2u);
  EXPECT_EQ(table.rows()[0].step, 5);
  EXPECT_EQ(table.rows()[1].step, -6);
  EXPECT_EQ(CsvTable::value(table.rows()[0], 0), std::nullopt);
  EXPECT_EQ(CsvTable::value(table.rows()[0], 1), 0.25);
  EXPECT_EQ(CsvTable::value(table.rows()[1], 1), std::nullopt);
  EXPECT_FALSE(table.torn());
}

TEST(CsvTable, AnyBytesAreRefusedOrReadAsRows) {
  const TemporaryFolder folder;
  const std::string whole = "step,loss,validation_loss\n5,,0.25\n6,inf,\n7,1e-3,nan\n";
  std::mt19937 random(3);
  int num_read = 0;
  for (int i = 0; i < 500; ++i) {
    std::string text = whole.substr(0, random() % (whole.size() + 1));
    for (auto changes = random() % 4; changes > 0 && !text.empty(); --changes)
      text[random() % text.size()] = "\n,\r\0x9-\xff"[random() % 8];
    write_file(folder / "m.csv", text);
    try {
      const CsvTable table(folder / "m.csv");
      for (const auto& row : table.rows()) {
        ASSERT_EQ(static_cast<std::size_t>(std::ranges::count(row.line, ',')),
                  table.columns().size());
        for (std::size_t column = 0; column < table.columns().size(); ++column)
          CsvTable::value(row, column);
        ++num_read;
      }
    } catch (const UsageError&) {
    }
  }
  EXPECT_GT(num_read, 100);
}

}  // namespace
}  // namespace lockstep::observe
