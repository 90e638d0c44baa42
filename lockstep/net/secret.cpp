#include <lockstep/net/secret.h>

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <openssl/sha.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <span>
#include <vector>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/file.h>
#include <lockstep/base/hash.h>
#include <lockstep/net/fd.h>

namespace lockstep::net {

namespace {

constexpr std::size_t kShortest = 16;
constexpr std::size_t kLongest = 4096;

std::vector<std::byte> read_from_start(int fd, const std::string& what) {
  std::vector<std::byte> bytes(kLongest);
  std::size_t size = 0;
  while (size < bytes.size()) {
    const ssize_t got =
        ::pread(fd, bytes.data() + size, bytes.size() - size, static_cast<off_t>(size));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      throw UsageError("cannot read the job's secret from {}: {}", what, std::strerror(errno));
    if (got == 0) break;
    size += static_cast<std::size_t>(got);
  }
  bytes.resize(size);
  return bytes;
}

Secret from_contents(std::vector<std::byte> contents, const std::string& what) {
  if (contents.size() < kShortest)
    throw UsageError("the job's secret in {} has {} bytes, and at least {} are needed: make one "
                     "with 'head -c 32 /dev/urandom'",
                     what, contents.size(), kShortest);
  Secret secret = Secret::from_bytes(contents);
  OPENSSL_cleanse(contents.data(), contents.size());
  return secret;
}

RegularFile open_secret_file(const std::string& path) {
  try {
    return RegularFile(path);
  } catch (const UsageError& error) {
    throw UsageError(
        "the secret file: {}; '(umask 077; head -c 32 /dev/urandom > FILE)' makes one, "
        "and every host needs the same",
        error.what());
  }
}

}  // namespace

Secret Secret::random() {
  Secret secret;
  fill_random(secret.bytes_);
  return secret;
}

Secret Secret::from_file(const std::string& path) {
  const RegularFile file = open_secret_file(path);
  struct stat info {};
  if (::fstat(file.fd(), &info) != 0)
    throw UsageError("cannot look at the secret file '{}': {}", path, std::strerror(errno));
  if ((info.st_mode & 077) != 0)
    throw UsageError("the secret file '{}' has mode {:04o}, so others could read it: run "
                     "'chmod 600 {}', and make a new secret if others may have seen it",
                     path, info.st_mode & 07777, path);
  return from_contents(read_from_start(file.fd(), "'" + path + "'"), "'" + path + "'");
}

Secret Secret::from_descriptor(int fd) {
  const std::string what = fmt::format("descriptor {}", fd);
  return from_contents(read_from_start(fd, what), what);
}

Secret Secret::from_bytes(std::span<const std::byte> bytes) {
  Secret secret;
  if (bytes.size() == kBytes) {
    std::memcpy(secret.bytes_.data(), bytes.data(), kBytes);
  } else {
    SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(),
           reinterpret_cast<unsigned char*>(secret.bytes_.data()));
  }
  return secret;
}

int Secret::to_inheritable_descriptor() const {
  const int fd = ::memfd_create("lockstep-secret", MFD_ALLOW_SEALING);
  if (fd < 0 || ::write(fd, bytes_.data(), kBytes) != static_cast<ssize_t>(kBytes))
    throw UsageError("cannot make an anonymous file for the job's secret: {}",
                     std::strerror(errno));
  ::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL);
  return fd;
}

Secret::Mac Secret::sign(std::span<const std::byte> message) const {
  Mac mac;
  unsigned int length = 0;
  const auto* done = HMAC(EVP_sha256(), bytes_.data(), static_cast<int>(kBytes),
                          reinterpret_cast<const unsigned char*>(message.data()), message.size(),
                          reinterpret_cast<unsigned char*>(mac.data()), &length);
  LOCKSTEP_CHECK(done != nullptr && length == mac.size());
  return mac;
}

Secret::~Secret() { OPENSSL_cleanse(bytes_.data(), bytes_.size()); }

bool equal(const Secret::Mac& a, const Secret::Mac& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

void fill_random(std::span<std::byte> bytes) {
  const int ok =
      RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), static_cast<int>(bytes.size()));
  LOCKSTEP_CHECK(ok == 1, "no randomness to be had");
}

namespace {

std::string signed_by(const Secret& secret, const std::string& run_id) {
  const std::string purpose = "the job's identity: " + run_id;
  std::string hex;
  for (const std::byte byte : secret.sign(std::as_bytes(std::span(purpose))))
    hex += fmt::format("{:02x}", std::to_integer<int>(byte));
  return hex;
}

}  // namespace

std::string job_identity() {
  const LaunchEnvironment launch = read_launch_environment();
  if (launch.secret_fd) return signed_by(Secret::from_descriptor(*launch.secret_fd), launch.run_id);
  if (!launch.secret_file.empty())
    return signed_by(Secret::from_file(launch.secret_file), launch.run_id);
  if (launch.run_id == "none") return "";
  return fmt::format("{:016x}", hash_text(launch.run_id));
}

}  // namespace lockstep::net
