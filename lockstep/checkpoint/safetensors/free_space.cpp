#include <lockstep/checkpoint/safetensors/free_space.h>

#include <system_error>

#include <lockstep/base/durable_file.h>

namespace lockstep::checkpoint {

void check_free_space(const std::filesystem::path& folder, std::uint64_t bytes) {
  std::error_code unknown;
  const auto space = std::filesystem::space(folder, unknown);
  if (unknown || space.capacity == 0 || space.available >= bytes) return;
  constexpr double kMebi = 1 << 20;
  throw FileError(
      "not enough room in '{}': {} bytes ({:.1f} MiB) are to be written, {} ({:.1f} MiB)"
      " are free. Remove something, or choose a folder on a larger disk",
      folder.string(), bytes, static_cast<double>(bytes) / kMebi, space.available,
      static_cast<double>(space.available) / kMebi);
}

}  // namespace lockstep::checkpoint
