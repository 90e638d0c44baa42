#include <lockstep/plan/precision.h>

#include <lockstep/base/error.h>

namespace lockstep::plan {

const char* name_of(Precision precision) {
  switch (precision) {
    case Precision::fp32: return "fp32";
    case Precision::bf16: return "bf16";
    case Precision::fp16: return "fp16";
  }
  return "unknown";
}

Precision precision_named(std::string_view name) {
  if (name == "fp32" || name == "float32" || name == "float") return Precision::fp32;
  if (name == "bf16" || name == "bfloat16") return Precision::bf16;
  if (name == "fp16" || name == "float16" || name == "half") return Precision::fp16;
  throw UsageError("'{}' is no precision: give fp32, bf16 or fp16", name);
}

}  // namespace lockstep::plan
