#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <lockstep/base/error.h>
#include <lockstep/base/file.h>

#include "errors.h"
#include "files.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
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
}

// Opening a FIFO would wait for a writer, and here there is none.
TEST(RegularFile, NothingElseIsOpened) {
  const testing::TemporaryFolder folder;
  ASSERT_EQ(::mkfifo((folder / "fifo").c_str(), 0600), 0);
  create_symlink(folder / "fifo", folder / "link");
  for (const char* name : {"fifo", "link"})
    EXPECT_THAT(usage_error([&] { RegularFile(folder / name); }),
                AllOf(HasSubstr(name), HasSubstr("is a FIFO, and only regular files are read")));
  EXPECT_THAT(usage_error([&] { RegularFile("/dev/null"); }), HasSubstr("is a device"));
  const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  const std::string path = (folder / "socket").string();
  ASSERT_LT(path.size(), sizeof address.sun_path);
  path.copy(address.sun_path, path.size());
  ASSERT_EQ(::bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  EXPECT_THAT(usage_error([&] { RegularFile(folder / "socket"); }), HasSubstr("is a socket"));
  ::close(listener);
  testing::write_file(folder / "file", "abc");
  create_symlink(folder / "file", folder / "to file");
  EXPECT_EQ(RegularFile(folder / "to file").size(), 3u);
}

}  // namespace
}  // namespace lockstep
