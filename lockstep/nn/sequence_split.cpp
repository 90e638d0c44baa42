#include <lockstep/nn/sequence_split.h>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>

namespace lockstep::nn {

namespace {

void check_part(const SequencePart& part) {
  if (part.size < 1 || part.rank < 0 || part.rank >= part.size)
    throw UsageError("rank {} of {} holds no part of a sequence: ranks count from 0, and there is "
                     "at least one",
                     part.rank, part.size);
}

}  // namespace

const char* name(SplitKind kind) { return kind == SplitKind::contiguous ? "contiguous" : "zigzag"; }

std::int64_t length_multiple(int size, SplitKind kind) {
  check_part({.rank = 0, .size = size});
  return size == 1 || kind == SplitKind::contiguous ? size : 2 * std::int64_t{size};
}

std::int64_t local_length(std::int64_t length, int size, SplitKind kind) {
  const auto multiple = length_multiple(size, kind);
  if (length < 0) throw UsageError("a sequence of {} positions cannot be split", length);
  if (length % multiple != 0) {
    const auto below = length / multiple * multiple;
    throw UsageError("a sequence of {} positions cannot be split among {} ranks, {}: its length "
                     "must be a multiple of {}. Pad it to {}{}",
                     length, size, name(kind), multiple, below + multiple,
                     below == 0 ? "" : fmt::format(", or cut it to {}", below));
  }
  return length / size;
}

std::vector<mesh::Interval> positions(std::int64_t length, const SequencePart& part) {
  check_part(part);
  const auto local = local_length(length, part.size, part.kind);
  if (part.size == 1 || part.kind == SplitKind::contiguous)
    return {{part.rank * local, (part.rank + 1) * local}};
  const auto chunk = local / 2;
  const auto last = 2 * part.size - 1 - part.rank;
  if (last == part.rank + 1) return {{part.rank * chunk, (last + 1) * chunk}};
  return {{part.rank * chunk, (part.rank + 1) * chunk}, {last * chunk, (last + 1) * chunk}};
}

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

internal::BlockSight internal::sight_of(const SequencePart& queries, int keys_rank,
                                        std::int64_t local_length, bool causal) {
  const mesh::Interval all{0, local_length};
  const mesh::Interval none{0, 0};
  if (!causal) return {all, all};
  // Positions ascend within a part.
  if (keys_rank == queries.rank) return {all, all, true};
  const bool later = keys_rank > queries.rank;
  if (queries.kind == SplitKind::contiguous) return {later ? none : all, all};
  // An earlier rank's first chunk is before all of ours, and its second after; a later rank's lie
  // between our two.
  const mesh::Interval first{0, local_length / 2};
  const mesh::Interval second{local_length / 2, local_length};
  return later ? BlockSight{second, all} : BlockSight{all, first};
}

}  // namespace lockstep::nn
