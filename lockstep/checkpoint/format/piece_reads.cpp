#include <lockstep/checkpoint/format/piece_reads.h>

#include <algorithm>
#include <optional>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/safetensors/quote.h>

namespace lockstep::checkpoint {

namespace {

// Those that were not cut along dims can be taken as of any shape.
void take_as_one_shape(const SavedTensor& tensor, std::vector<mesh::Placement>& pieces,
                       mesh::Placement& wanted) {
  std::optional<std::vector<std::int64_t>> cut_as;
  const auto look_at = [&](const mesh::Placement& placement) {
    if (placement.has_whole_box_of_tensor()) return;
    if (cut_as && *cut_as != placement.shape())
      throw UsageError("{} was cut along the dims of {}, and is asked for along those of {}",
                       quote(tensor.name), shape_text(*cut_as), shape_text(placement.shape()));
    cut_as = placement.shape();
  };
  for (const mesh::Placement& piece : pieces) look_at(piece);
  look_at(wanted);
  const auto& shape = cut_as ? *cut_as : tensor.shape;
  const auto take = [&](mesh::Placement& placement) {
    if (placement.shape() != shape) placement = placement.in_shape(shape);
  };
  for (mesh::Placement& piece : pieces) take(piece);
  take(wanted);
}

}  // namespace

std::vector<mesh::Read> plan_piece_reads(const SavedTensor& tensor,
                                         std::vector<mesh::Placement> pieces,
                                         mesh::Placement wanted, int reader) {
  take_as_one_shape(tensor, pieces, wanted);
  mesh::ReadPlan plan = mesh::plan_reads(wanted, pieces, {.reader = reader, .local = {}});
  plan.check_complete(tensor.name, wanted);
  std::ranges::stable_sort(plan.reads, {}, &mesh::Read::holder);
  return std::move(plan.reads);
}

}  // namespace lockstep::checkpoint
