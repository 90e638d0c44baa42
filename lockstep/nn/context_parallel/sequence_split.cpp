#include <lockstep/nn/context_parallel/sequence_split.h>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>

namespace lockstep::nn {

at::Tensor take_part(const at::Tensor& whole, std::int64_t dim, const SequencePart& part) {
  std::vector<at::Tensor> pieces;
  for (const auto& held : positions(whole.size(dim), part))
    pieces.push_back(whole.narrow(dim, held.begin, held.size()));
  return pieces.size() == 1 ? pieces.front() : at::cat(pieces, dim);
}

at::Tensor join_parts(const std::vector<at::Tensor>& parts, std::int64_t dim, SplitKind kind) {
  if (parts.empty()) throw UsageError("a sequence cannot be joined from no parts");
  const auto size = static_cast<int>(parts.size());
  const auto local = parts.front().size(dim);
  for (int rank = 0; rank < size; ++rank)
    if (const auto length = parts[static_cast<std::size_t>(rank)].size(dim); length != local)
      throw UsageError("the parts of one sequence have the same length, but that of rank 0 has {} "
                       "positions and that of rank {} has {}",
                       local, rank, length);
  if (size == 1) return parts.front();
  if (kind == SplitKind::contiguous) return at::cat(parts, dim);
  if (local % 2 != 0)
    throw UsageError("parts of {} positions are not of a zigzag split: those hold two chunks of "
                     "the same length",
                     local);
  const auto chunk = local / 2;
  std::vector<at::Tensor> chunks;
  for (const auto& part : parts) chunks.push_back(part.narrow(dim, 0, chunk));
  for (auto part = parts.rbegin(); part != parts.rend(); ++part)
    chunks.push_back(part->narrow(dim, chunk, chunk));
  return at::cat(chunks, dim);
}

}  // namespace lockstep::nn
