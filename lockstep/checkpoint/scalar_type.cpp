#include <lockstep/checkpoint/scalar_type.h>

#include <string_view>
#include <utility>

namespace lockstep::checkpoint {

namespace {

// By LibTorch's own names: older versions lack some of them, and with them the enumerators.
constexpr std::pair<DType, std::string_view> kTypes[] = {
    {DType::boolean, "Bool"},
    {DType::u8, "Byte"},
    {DType::i8, "Char"},
    {DType::f8_e5m2, "Float8_e5m2"},
    {DType::f8_e4m3, "Float8_e4m3fn"},
    {DType::f8_e8m0, "Float8_e8m0fnu"},
    {DType::f8_e4m3fnuz, "Float8_e4m3fnuz"},
    {DType::f8_e5m2fnuz, "Float8_e5m2fnuz"},
    {DType::i16, "Short"},
    {DType::u16, "UInt16"},
    {DType::f16, "Half"},
    {DType::bf16, "BFloat16"},
    {DType::i32, "Int"},
    {DType::u32, "UInt32"},
    {DType::f32, "Float"},
    {DType::c64, "ComplexFloat"},
    {DType::f64, "Double"},
    {DType::i64, "Long"},
    {DType::u64, "UInt64"},
};

}  // namespace

std::optional<DType> dtype_of(c10::ScalarType type) {
  for (const auto& [dtype, name] : kTypes)
    if (name == c10::toString(type)) return dtype;
  return std::nullopt;
}

std::optional<c10::ScalarType> scalar_type_of(DType dtype) {
  for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i)
    if (const auto type = static_cast<c10::ScalarType>(i); dtype_of(type) == dtype) return type;
  return std::nullopt;
}

}  // namespace lockstep::checkpoint
