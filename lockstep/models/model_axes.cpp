#include <lockstep/models/model_axes.h>

#include <algorithm>

#include <ATen/core/Tensor.h>

#include <lockstep/base/error.h>
#include <lockstep/models/spec/family.h>

namespace lockstep::models {

namespace {

nn::SequencePart part_of(const ModelAxes& axes) {
  return {.rank = axes.context->rank(), .size = axes.context->size(), .kind = axes.context_split};
}

std::int64_t length_of(const std::vector<mesh::Interval>& intervals) {
  std::int64_t length = 0;
  for (const mesh::Interval& one : intervals) length += one.size();
  return length;
}

// Returns the positions [begin, end) of the intervals put one after the other.
std::vector<mesh::Interval> slice(const std::vector<mesh::Interval>& intervals, std::int64_t begin,
                                  std::int64_t end) {
  std::vector<mesh::Interval> taken;
  for (const mesh::Interval& one : intervals) {
    const mesh::Interval part{.begin = one.begin + std::clamp<std::int64_t>(begin, 0, one.size()),
                              .end = one.begin + std::clamp<std::int64_t>(end, 0, one.size())};
    if (part.size() > 0) taken.push_back(part);
    begin -= one.size();
    end -= one.size();
  }
  return taken;
}

}  // namespace

ModelAxes::Positions ModelAxes::positions(std::int64_t length) const {
  Positions all;
  all.attended = context == nullptr ? std::vector<mesh::Interval>{{.begin = 0, .end = length}}
                                    : nn::positions(length, part_of(*this));
  all.between = all.attended;
  if (tensor == nullptr || !tensor->by_positions()) return all;
  const std::int64_t attended = length_of(all.attended);
  const int size = tensor->size();
  if (attended % size != 0)
    throw UsageError("sequence parallelism cannot slice the {} positions that each rank attends "
                     "from over {} ranks: take a length that is a multiple of {}",
                     attended, size, length / attended * size);
  const std::int64_t each = attended / size;
  all.between = slice(all.attended, tensor->rank() * each, (tensor->rank() + 1) * each);
  return all;
}

at::Tensor ModelAxes::attended_part(const at::Tensor& tokens) const {
  return context == nullptr ? tokens : nn::take_part(tokens, 1, part_of(*this));
}

nn::TensorPlan tensor_plan(const ModelConfig& config) {
  nn::TensorPlan plan;
  for (const Layer& layer : layers_of(config)) switch (layer.cut) {
      case Layer::Cut::whole: break;
      case Layer::Cut::columns:
        plan.push_back(
            {layer.name, {.kind = nn::CutKind::column, .blocks = layer.parts, .unit = layer.unit}});
        break;
      case Layer::Cut::rows: plan.push_back({layer.name, {.kind = nn::CutKind::row}}); break;
      case Layer::Cut::vocabulary:
        plan.push_back({layer.name, {.kind = nn::CutKind::vocabulary}});
        break;
    }
  return plan;
}

}  // namespace lockstep::models
