// The job's secret, which proves that a process belongs to the job, and the job's identity. The
// secret travels in a file that only its owner can read or in an inherited descriptor, never in an
// argument or an environment variable, and is wiped from memory when it is no longer needed.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>

namespace lockstep::net {

class Secret {
 public:
  static constexpr std::size_t kBytes = 32;
  using Mac = std::array<std::byte, 32>;

  static Secret random();

  // Reads at least 16 bytes; secrets of another length than kBytes are hashed. UsageError if the
  // file is missing, too short, or readable by anyone but its owner.
  static Secret from_file(const std::string& path);

  // Reads from the start of an inherited descriptor (a memfd) and leaves it open and unmoved, so
  // that several readers in a process and its children can all read it.
  static Secret from_descriptor(int fd);

  static Secret from_bytes(std::span<const std::byte> bytes);

  // An anonymous file that holds the secret, for children to inherit (not closed on exec).
  int to_inheritable_descriptor() const;

  // HMAC-SHA-256 over the message.
  Mac sign(std::span<const std::byte> message) const;

  std::span<const std::byte> bytes() const { return bytes_; }

  Secret(const Secret&) = default;
  Secret& operator=(const Secret&) = default;
  Secret(Secret&&) = default;
  Secret& operator=(Secret&&) = default;
  ~Secret();

 private:
  Secret() = default;
  std::array<std::byte, kBytes> bytes_{};
};

// Compares two codes, in time that does not depend on where they differ.
bool equal(const Secret::Mac& a, const Secret::Mac& b);

// Fills memory with bytes that nobody can guess.
void fill_random(std::span<std::byte> bytes);

// A text that is the same in all processes of this job, in all of its generations, and different in
// every other job. It is computed from the job's name (`--rdzv-id`) and its secret, which it does
// not reveal. Empty if the launcher gives neither. Two jobs that run at the same time with the same
// name and the same secret file cannot be told apart.
std::string job_identity();

}  // namespace lockstep::net
