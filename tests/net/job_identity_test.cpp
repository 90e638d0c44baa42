#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdlib.h>
#include <unistd.h>

#include <string>

#include <lockstep/net/secret.h>

#include "../base/variables.h"

namespace lockstep::net {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string identity_of(const std::string& name, const std::string& secret_file,
                        const std::string& generation) {
  Variables variables;
  for (const auto* other : {"LOCKSTEP_STORE", "LOCKSTEP_SECRET_FD", "LOCKSTEP_SPARE"})
    variables.unset(other);
  variables.set("RANK", "0");
  variables.set("WORLD_SIZE", "1");
  variables.set("LOCKSTEP_GENERATION", generation);
  variables.set("TORCHELASTIC_RUN_ID", name);
  variables.set("LOCKSTEP_SECRET_FILE", secret_file);
  return job_identity();
}

// Only its owner can read it, as mkstemp() makes it.
class FileWithSecret {
 public:
  explicit FileWithSecret(char letter) {
    const int fd = ::mkstemp(path_.data());
    const std::string secret(32, letter);
    EXPECT_EQ(::write(fd, secret.data(), secret.size()), 32);
    ::close(fd);
  }
  ~FileWithSecret() { ::unlink(path_.c_str()); }
  FileWithSecret(const FileWithSecret&) = delete;
  FileWithSecret& operator=(const FileWithSecret&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_ = "/tmp/lockstep-secret-XXXXXX";
};

TEST(JobIdentity, IsThatOfAllGenerationsAndOfNoOtherJob) {
  const FileWithSecret mine('m');
  const FileWithSecret other('o');
  const std::string first = identity_of("none", mine.path(), "0");
  EXPECT_FALSE(first.empty());
  EXPECT_EQ(identity_of("none", mine.path(), "3"), first);
  EXPECT_NE(identity_of("none", other.path(), "0"), first);
  EXPECT_NE(identity_of("job7", mine.path(), "0"), first);
  EXPECT_THAT(first, Not(HasSubstr("mmmm")));
  EXPECT_EQ(identity_of("job7", "", "0"), identity_of("job7", "", "1"));
  EXPECT_NE(identity_of("job7", "", "0"), identity_of("job8", "", "0"));
  EXPECT_EQ(identity_of("none", "", "1"), "") << "which any other job is called, too";
}

}  // namespace
}  // namespace lockstep::net
