#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <lockstep/net/fd.h>
#include <lockstep/net/secret.h>

#include "../base/errors.h"

namespace lockstep::net {
namespace {

using testing::HasSubstr;

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

bool same(const Secret& a, const Secret& b) { return std::ranges::equal(a.bytes(), b.bytes()); }

std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", std::to_integer<int>(byte));
  return text;
}

class SecretFile : public testing::Test {
 protected:
  SecretFile() {
    std::string name = "/tmp/lockstep-secret-XXXXXX";
    folder_ = ::mkdtemp(name.data());
    path_ = folder_ + "/secret";
  }
  ~SecretFile() override { std::filesystem::remove_all(folder_); }

  void write(const std::string& contents, mode_t mode = 0600) const {
    std::ofstream(path_, std::ios::binary) << contents;
    ASSERT_EQ(::chmod(path_.c_str(), mode), 0);
  }

  std::string folder_;
  std::string path_;
};

TEST_F(SecretFile, OwnersFilesAreRead) {
  const std::string contents(32, 's');
  for (const mode_t mode : {0600, 0400, 0700}) {
    write(contents, mode);
    EXPECT_TRUE(same(Secret::from_file(path_), Secret::from_bytes(bytes_of(contents)))) << mode;
    ::chmod(path_.c_str(), 0600);
  }
}

TEST_F(SecretFile, FilesThatOthersCanTouchAreRefused) {
  write(std::string(32, 's'));
  for (const mode_t mode : {0640, 0604, 0620, 0602, 0610, 0601, 0644, 0666, 0777}) {
    ASSERT_EQ(::chmod(path_.c_str(), mode), 0);
    const auto error = usage_error([&] { Secret::from_file(path_); });
    EXPECT_THAT(error, HasSubstr(fmt::format("mode {:04o}", mode)));
    EXPECT_THAT(error, HasSubstr("chmod 600 " + path_));
  }
}

TEST_F(SecretFile, ShortAndMissingFilesAreRefused) {
  EXPECT_THAT(usage_error([&] { Secret::from_file(path_); }), HasSubstr(path_));
  write("");
  EXPECT_THAT(usage_error([&] { Secret::from_file(path_); }), HasSubstr("has 0 bytes"));
  write(std::string(15, 's'));
  EXPECT_THAT(usage_error([&] { Secret::from_file(path_); }), HasSubstr("has 15 bytes"));
  write(std::string(16, 's'));
  EXPECT_NO_THROW(Secret::from_file(path_));
  EXPECT_THAT(usage_error([&] { Secret::from_file(folder_); }), HasSubstr(folder_));
}

TEST_F(SecretFile, LongFilesCountToTheLastByte) {
  write(std::string(1000, 's') + "a");
  const auto a = Secret::from_file(path_);
  write(std::string(1000, 's') + "b");
  EXPECT_FALSE(same(a, Secret::from_file(path_)));
  write(std::string(1000, 's') + "a");
  EXPECT_TRUE(same(a, Secret::from_file(path_)));
}

TEST(Secret, RandomOnesDiffer) { EXPECT_FALSE(same(Secret::random(), Secret::random())); }

TEST(Secret, OtherLengthsAreHashed) {
  // SHA-256 of "abc", FIPS 180-2.
  EXPECT_EQ(hex(Secret::from_bytes(bytes_of("abc")).bytes()),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Secret, SignsWithHmacSha256) {
  // HMAC(SHA-256) with a key of 32 bytes 0x0b and "Hi There", computed with another program.
  const auto secret = Secret::from_bytes(bytes_of(std::string(32, '\x0b')));
  EXPECT_EQ(hex(secret.sign(bytes_of("Hi There"))),
            "198a607eb44bfbc69903a0f1cf2bbdc5ba0aa3f3d9ae3c1c7a3b1696a0b68cf7");
  EXPECT_FALSE(equal(secret.sign(bytes_of("Hi There")), secret.sign(bytes_of("Hi There!"))));
  EXPECT_TRUE(equal(secret.sign({}), secret.sign({})));
}

TEST(Secret, DescriptorsAreReadByEveryoneWhoInheritsThem) {
  const auto secret = Secret::random();
  const Fd fd(secret.to_inheritable_descriptor());
  EXPECT_EQ(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, 0);
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(same(Secret::from_descriptor(fd.get()), secret));
  EXPECT_EQ(::write(fd.get(), "x", 1), -1) << "it can be written";
  EXPECT_EQ(::ftruncate(fd.get(), 0), -1) << "it can be cut";
  // Another program finds it under the same number.
  const std::string command = fmt::format(
      "test \"$(od -An -v -tx1 /dev/fd/{} | tr -d ' \\n')\" = {}", fd.get(), hex(secret.bytes()));
  EXPECT_EQ(std::system(command.c_str()), 0);
}

TEST(Secret, BadDescriptorsAreNamed) {
  EXPECT_THAT(usage_error([] { Secret::from_descriptor(999999); }), HasSubstr("descriptor 999999"));
}

TEST(Random, FillsEveryByte) {
  std::array<std::byte, 64> a{};
  std::array<std::byte, 64> b{};
  fill_random(a);
  fill_random(b);
  EXPECT_NE(a, b);
}

}  // namespace
}  // namespace lockstep::net
