// Switches LibTorch's autocast on for the life of an object.
//
//   {
//     const device::Autocast fp16(at::kCUDA, at::kHalf);
//     loss = model->forward(batch);
//   }
//   loss.backward();
#pragma once

#include <cstdint>
#include <optional>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace lockstep::device {

// How long autocast's copies of weights live.
enum class CastCache : std::uint8_t {
  kept,    // until the outermost Autocast ends: a weight is cast once for all its uses
  unused,  // cast anew for each use, for weights that change or lose their memory in between
};

// While this object lives, operators on one type of device compute in 16 bits where that is safe,
// in the thread that made it. When it ends, everything is as it was, and with the outermost one the
// copies of weights are gone. These objects nest like blocks, end in the thread in which they
// began, and are neither copied nor moved.
class Autocast {
 public:
  // `dtype` is BFloat16 or Half. UsageError for other types, and if LibTorch has no autocast for
  // the device, as for Half on CPUs before LibTorch 2.
  Autocast(c10::DeviceType device, c10::ScalarType dtype, CastCache cache = CastCache::kept);

  // Switches autocast off within a region that has it on, for work that must not lose precision.
  [[nodiscard]] static Autocast off(c10::DeviceType device);

  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

  // The type that this thread computes in on such a device; nothing if autocast is off or missing.
  static std::optional<c10::ScalarType> active(c10::DeviceType device);

 private:
  struct Settings {
    bool enabled;
    c10::ScalarType dtype;
    bool cache;
  };

  Autocast(c10::DeviceType device, const Settings& settings);
  static Settings current(c10::DeviceType device);
  void apply(const Settings& settings) const;

  c10::DeviceType device_;
  Settings before_;
};

}  // namespace lockstep::device
