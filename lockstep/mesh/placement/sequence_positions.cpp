#include <lockstep/mesh/placement/sequence_positions.h>

#include <lockstep/base/error.h>

namespace lockstep::mesh {

namespace {

void check_part(const SequencePart& part) {
  if (part.size < 1 || part.rank < 0 || part.rank >= part.size)
    throw UsageError("rank {} of {} holds no part of a sequence: ranks count from 0, and there is "
                     "at least one",
                     part.rank, part.size);
}

}  // namespace

const char* name(SplitKind kind) { return kind == SplitKind::contiguous ? "contiguous" : "zigzag"; }

const char* name(ContextAlgorithm algorithm) {
  return algorithm == ContextAlgorithm::ring ? "ring" : "all_to_all";
}

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

std::vector<Interval> positions(std::int64_t length, const SequencePart& part) {
  check_part(part);
  const auto local = local_length(length, part.size, part.kind);
  if (part.size == 1 || part.kind == SplitKind::contiguous)
    return {{part.rank * local, (part.rank + 1) * local}};
  const auto chunk = local / 2;
  const auto last = 2 * part.size - 1 - part.rank;
  if (last == part.rank + 1) return {{part.rank * chunk, (last + 1) * chunk}};
  return {{part.rank * chunk, (part.rank + 1) * chunk}, {last * chunk, (last + 1) * chunk}};
}

internal::BlockSight internal::sight_of(const SequencePart& queries, int keys_rank,
                                        std::int64_t local_length, bool causal) {
  const Interval all{0, local_length};
  const Interval none{0, 0};
  if (!causal) return {all, all};
  // Positions ascend within a part.
  if (keys_rank == queries.rank) return {all, all, true};
  const bool later = keys_rank > queries.rank;
  if (queries.kind == SplitKind::contiguous) return {later ? none : all, all};
  // An earlier rank's first chunk is before all of ours, and its second after; a later rank's lie
  // between our two.
  const Interval first{0, local_length / 2};
  const Interval second{local_length / 2, local_length};
  return later ? BlockSight{second, all} : BlockSight{all, first};
}

}  // namespace lockstep::mesh
