#include <lockstep/device/peak_flops.h>

namespace lockstep::device {

namespace {

struct Peak {
  const char* name;  // a part of the device's
  double half;       // of bfloat16 and float16, in TFLOP/s
  double single;     // of float32, without TF32
};

// The first that fits: longer names come before those that they begin with.
constexpr Peak kPeaks[] = {
    {"GB200", 2500, 80},       {"B200", 2250, 75},     {"B100", 1750, 60},
    {"GH200", 989.4, 67},      {"H200 NVL", 835, 60},  {"H200", 989.4, 67},
    {"H100 PCIe", 756, 51},    {"H100 NVL", 835, 60},  {"H100", 989.4, 67},
    {"H800", 989.4, 67},       {"A100", 312, 19.5},    {"A800", 312, 19.5},
    {"A40", 149.7, 37.4},      {"A30", 165, 10.3},     {"L40S", 362, 91.6},
    {"L40", 181, 90.5},        {"L4", 121, 30.3},      {"RTX 5090", 209.5, 104.8},
    {"RTX 4090", 165.2, 82.6}, {"RTX 3090", 71, 35.6},
};

}  // namespace

std::optional<double> peak_flops(const std::string& device_name, c10::ScalarType type) {
  for (const Peak& peak : kPeaks) {
    if (device_name.find(peak.name) == std::string::npos) continue;
    if (type == c10::ScalarType::BFloat16 || type == c10::ScalarType::Half) return peak.half * 1e12;
    if (type == c10::ScalarType::Float) return peak.single * 1e12;
  }
  return std::nullopt;
}

}  // namespace lockstep::device
