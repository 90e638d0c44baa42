#include <lockstep/parallel/shard/unit_format.h>

namespace lockstep::shard {

UnitFormat UnitFormat::of(at::ScalarType own, c10::Device device) {
  return {.own = own,
          .gathered = own,
          .sent = own,
          .reduced = own,
          .device = device,
          .stepped_on = device,
          .sent_from = device};
}

UnitFormat UnitFormat::of(at::ScalarType own, c10::Device device, const MixedPrecision& precision,
                          const CPUOffload& offload) {
  UnitFormat format = of(own, device);
  if (own == at::kFloat) {
    format.sent = precision.param_dtype.value_or(own);
    format.reduced = precision.reduce_dtype.value_or(own);
    if (computes_in_param_dtype(precision, device)) format.gathered = format.sent;
  }
  if (offload.offload_optimizer) format.stepped_on = at::kCPU;
  if (offload.offload_params) format.sent_from = at::kCPU;
  return format;
}

}  // namespace lockstep::shard
