#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <lockstep/base/error.h>
#include <lockstep/base/mapped_file.h>

#include "errors.h"
#include "files.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;

TEST(MappedFile, HasTheFilesBytes) {
  const testing::TemporaryFolder folder;
  testing::write_file(folder / "text", "some bytes");
  MappedFile file(folder / "text");
  const MappedFile moved = std::move(file);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(moved.bytes().data()), moved.size()),
            "some bytes");
  EXPECT_EQ(file.size(), 0u);
}

TEST(MappedFile, MayBeEmpty) {
  const testing::TemporaryFolder folder;
  testing::write_file(folder / "empty", "");
  EXPECT_EQ(MappedFile(folder / "empty").size(), 0u);
}

TEST(MappedFile, SaysWhatIsWrong) {
  const testing::TemporaryFolder folder;
  EXPECT_THAT(usage_error([&] { MappedFile(folder / "missing"); }),
              HasSubstr("missing': No such file"));
  EXPECT_THAT(usage_error([&] { MappedFile(folder.path()); }), HasSubstr("is a folder"));
  ASSERT_EQ(::mkfifo((folder / "fifo").c_str(), 0600), 0);
  EXPECT_THAT(usage_error([&] { MappedFile(folder / "fifo"); }), HasSubstr("is not a file"));
}

}  // namespace
}  // namespace lockstep
