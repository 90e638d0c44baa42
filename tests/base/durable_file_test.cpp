#include <unistd.h>

#include <fstream>
#include <string_view>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/durable_file.h>

#include "files.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;

TEST(DurableFile, AppearsAtCommit) {
  const testing::TemporaryFolder folder;
  testing::write_file(folder / "file", "old");
  DurableFile file(folder / "file");
  file.write("ne");
  file.write("w");
  EXPECT_EQ(testing::read_file(folder / "file"), "old");
  file.commit();
  EXPECT_EQ(testing::read_file(folder / "file"), "new");
}

TEST(DurableFile, LeavesNothingBehindWithoutCommit) {
  const testing::TemporaryFolder folder;
  { DurableFile(folder / "file").write("half"); }
  EXPECT_TRUE(is_empty(folder.path()));
}

TEST(DurableFile, NamesTheFileAndTheReason) {
  const testing::TemporaryFolder folder;
  try {
    write_durably(folder / "no" / "file", "text");
    FAIL() << "a file in a folder that is not there was written";
  } catch (const FileError& error) {
    EXPECT_THAT(error.what(), HasSubstr("no/file': No such file or directory"));
  }
}

// The data goes past the page cache if the file system can do that; a file system in memory cannot.
TEST(DurableFile, MuchDataComesWhole) {
  const testing::TemporaryFolder folder;
  const std::string in_memory = "/dev/shm/lockstep-test-" + std::to_string(::getpid());
  constexpr std::size_t kMebi = 1 << 20;
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, std::size_t{4095}, std::size_t{4096}, std::size_t{4097},
        4 * kMebi - 1, 4 * kMebi, 4 * kMebi + 1, 9 * kMebi + 4096, 9 * kMebi + 5}) {
    std::string text(size, ' ');
    for (std::size_t i = 0; i < size; ++i) text[i] = static_cast<char>(i * i >> 7);
    for (const std::size_t piece : {std::size_t{77777}, 16 * kMebi})
      for (const auto& path : {folder / "file", std::filesystem::path(in_memory)}) {
        if (path == in_memory && !std::filesystem::is_directory("/dev/shm")) continue;
        DurableFile file(path, DurableFile::Length::much_data);
        for (std::size_t at = 0; at < size; at += piece)
          file.write(std::string_view(text).substr(at, piece));
        file.commit();
        std::string got(std::filesystem::file_size(path), ' ');
        std::ifstream(path, std::ios::binary)
            .read(got.data(), static_cast<std::streamsize>(got.size()));
        EXPECT_TRUE(got == text) << size << " bytes in pieces of " << piece;
        std::filesystem::remove(path);
      }
  }
}

TEST(DurableFile, MuchDataOnAFullDiskIsAnErrorToo) {
  const testing::TemporaryFolder folder;
  std::filesystem::create_symlink("/dev/full", folder / "file.part");
  DurableFile file(folder / "file", DurableFile::Length::much_data);
  const std::string text(5 << 20, 'x');
  EXPECT_THROW(
      {
        file.write(text);
        file.commit();
      },
      FileError);
}

// Every Linux has this device, which is always full.
TEST(DurableFile, AFullDiskIsAnErrorThatLeavesNothing) {
  const testing::TemporaryFolder folder;
  std::filesystem::create_symlink("/dev/full", folder / "file.part");
  try {
    write_durably(folder / "file", "text");
    FAIL() << "a full disk took a file";
  } catch (const FileError& error) {
    EXPECT_THAT(error.what(), HasSubstr("No space left"));
  }
  EXPECT_TRUE(is_empty(folder.path()));
}

}  // namespace
}  // namespace lockstep
