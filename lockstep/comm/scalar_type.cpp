#include <lockstep/comm/scalar_type.h>

#include <lockstep/base/error.h>

namespace lockstep::comm {

DType dtype_of(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float: return DType::float32;
    case c10::ScalarType::Double: return DType::float64;
    case c10::ScalarType::Half: return DType::float16;
    case c10::ScalarType::BFloat16: return DType::bfloat16;
    case c10::ScalarType::Int: return DType::int32;
    case c10::ScalarType::Long: return DType::int64;
    case c10::ScalarType::Byte: return DType::uint8;
    case c10::ScalarType::Bool: return DType::boolean;
    default:
      throw UsageError("tensors of dtype {} cannot be communicated: use float32, float64, float16, "
                       "bfloat16, int32, int64, uint8 or bool (tensor.view(torch::kByte) sends any "
                       "type's bytes)",
                       c10::toString(type));
  }
}

c10::ScalarType scalar_type_of(DType dtype) {
  switch (dtype) {
    case DType::float32: return c10::ScalarType::Float;
    case DType::float64: return c10::ScalarType::Double;
    case DType::float16: return c10::ScalarType::Half;
    case DType::bfloat16: return c10::ScalarType::BFloat16;
    case DType::int32: return c10::ScalarType::Int;
    case DType::int64: return c10::ScalarType::Long;
    case DType::uint8: return c10::ScalarType::Byte;
    case DType::boolean: return c10::ScalarType::Bool;
  }
  LOCKSTEP_CHECK(false, "dtype {}", static_cast<int>(dtype));
  return c10::ScalarType::Undefined;
}

}  // namespace lockstep::comm
