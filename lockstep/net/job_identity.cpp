#include <lockstep/net/job_identity.h>

#include <span>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/net/secret.h>

namespace lockstep::net {

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
