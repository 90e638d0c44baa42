// Much data to a file, one byte after the other, past the page cache where the file system allows
// it.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <span>

namespace lockstep {

// The disk takes the bytes from memory of ours, so that nobody copies them into the page cache and
// later looks for what is dirty there: several times less work for the processor, and what other
// programs have cached stays. Where a file system refuses (its own rules of alignment, no such
// thing as past the cache), the bytes go the usual way.
//
// Ownership: the descriptor is the caller's. Threading: one thread. Failure: false, with the
// system's reason in errno; the file is then not to be used.
class DirectOutput {
 public:
  explicit DirectOutput(int fd);

  bool write(std::span<const std::byte> bytes);
  // What is still in memory. The last thing written.
  bool finish();

 private:
  struct Freed {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  void stop_being_direct();
  // All of it.
  bool write_out(std::span<const std::byte> bytes);

  int fd_;
  bool direct_ = false;
  std::unique_ptr<std::byte, Freed> buffer_;  // kBufferBytes, where direct_ was ever true
  std::size_t filled_ = 0;
};

}  // namespace lockstep
