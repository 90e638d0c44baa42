#include <lockstep/checkpoint/safetensors/dtype.h>

#include <array>
#include <cstddef>

namespace lockstep::checkpoint {

namespace {

struct Description {
  std::string_view name;
  unsigned bits;
};

// In the order of the enumeration.
constexpr std::array<Description, 22> kTypes{{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
}};
static_assert(kTypes.size() == static_cast<std::size_t>(DType::u64) + 1);

}  // namespace

std::string_view name(DType dtype) { return kTypes[static_cast<std::size_t>(dtype)].name; }

std::optional<DType> dtype_from_name(std::string_view name) {
  for (std::size_t i = 0; i < kTypes.size(); ++i)
    if (kTypes[i].name == name) return static_cast<DType>(i);
  return std::nullopt;
}

unsigned bits_of(DType dtype) { return kTypes[static_cast<std::size_t>(dtype)].bits; }

bool is_floating(DType dtype) {
  return dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32 || dtype == DType::f64;
}

}  // namespace lockstep::checkpoint
