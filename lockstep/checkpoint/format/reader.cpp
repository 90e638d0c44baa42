#include <lockstep/checkpoint/format/reader.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <optional>
#include <set>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/base/file.h>
#include <lockstep/base/float16.h>
#include <lockstep/base/on_threads.h>
#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/device/host/host.h>

namespace lockstep::checkpoint {

namespace {

// Placements that are not cut along a dim can be converted to any shape with as many elements.
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

namespace {

// So many threads use all that memory and disks give.
constexpr int kMostThreads = 8;
constexpr std::uint64_t kLargestManifest = 1 << 30;

}  // namespace

CheckpointReader::CheckpointReader(std::filesystem::path checkpoint, int reader)
    : path_(std::move(checkpoint)),
      reader_(reader),
      num_threads_(std::min(kMostThreads, device::Host().num_usable_cores())) {
  if (!is_checkpoint(path_))
    throw UsageError("'{}' is no checkpoint: it has no {}", path_.string(), kManifestFile);
  manifest_ = read_manifest();
}

Manifest CheckpointReader::read_manifest() {
  const std::filesystem::path path = path_ / kManifestFile;
  if (!is_there(path))
    throw DamagedCheckpoint("'{}' has lost its {}: a checkpoint gets its name when that file is "
                            "written, so that somebody or something has removed it since",
                            path_.string(), kManifestFile);
  const RegularFile file = open_unread(kManifestFile);
  if (file.size() > kLargestManifest)
    fail(kManifestFile, fmt::format("has {} bytes, of which none has more than {}", file.size(),
                                    kLargestManifest));
  std::string text(file.size(), '\0');
  read_bytes(file.fd(), kManifestFile, 0, std::as_writable_bytes(std::span(text)));
  return parse_manifest(text, fmt::format("'{}'", path.string()));
}

const TensorRecord* CheckpointReader::find(const std::string& tensor) const {
  const auto found = manifest_.tensors.find(tensor);
  return found == manifest_.tensors.end() ? nullptr : &found->second;
}

void CheckpointReader::fail(const std::string& file, const std::string& what) const {
  throw DamagedCheckpoint("'{}' {}: the checkpoint is damaged, or was changed since it was written",
                          (path_ / file).string(), what);
}

const CheckpointReader::OpenFile& CheckpointReader::open(const std::string& file) {
  if (const auto found = files_.find(file); found != files_.end()) return found->second;
  OpenFile opened{.file = open_unread(file), .header = {}};
  const std::string head = read_head(opened.file, file);
  if (file.ends_with(".safetensors"))
    opened.header =
        parse_header(std::as_bytes(std::span(head)), opened.file.size(), (path_ / file).string());
  return files_.emplace(file, std::move(opened)).first->second;
}

RegularFile CheckpointReader::open_unread(const std::string& file) const {
  try {
    return RegularFile(path_ / file);
  } catch (const UsageError& error) {
    throw DamagedCheckpoint("{}: the checkpoint is damaged, or was changed since it was written",
                            error.what());
  }
}

std::string CheckpointReader::read_head(const RegularFile& opened, const std::string& file) {
  const FileRecord& record = manifest_.files.at(file);
  if (opened.size() != record.bytes)
    fail(file, fmt::format("has {} bytes, and had {}", opened.size(), record.bytes));
  std::string head(record.head_bytes, '\0');
  read_bytes(opened.fd(), file, 0, std::as_writable_bytes(std::span(head)));
  if (content_hash(head) != record.hash)
    fail(file, fmt::format("is not what was written in its first {} bytes", record.head_bytes));
  return head;
}

CheckpointReader::Source CheckpointReader::source_of(const std::string& tensor,
                                                     const TensorRecord& record,
                                                     const Piece& piece) {
  const OpenFile& file = open(piece.file);
  const TensorEntry* const entry = file.header.find(piece_name(tensor, piece.placement));
  const std::uint64_t bytes = piece_bytes(record.dtype, piece.placement);
  if (entry == nullptr || entry->dtype != record.dtype || entry->size_bytes() != bytes)
    fail(piece.file,
         fmt::format("does not have {} {} of {} as the manifest has it",
                     checkpoint::name(record.dtype), piece.placement.text(), quote(tensor)));
  return {file.file.fd(), file.header.data_offset + entry->begin, bytes, &piece, &tensor};
}

void CheckpointReader::read_bytes(int fd, const std::string& file, std::uint64_t offset,
                                  std::span<std::byte> into) {
  while (!into.empty()) {
    const ssize_t count = ::pread(fd, into.data(), into.size(), static_cast<::off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(file, fmt::format("cannot be read ({})", std::strerror(errno)));
    if (count == 0) fail(file, fmt::format("ends at byte {}", offset));
    offset += static_cast<std::uint64_t>(count);
    bytes_read_ += static_cast<std::uint64_t>(count);
    into = into.subspan(static_cast<std::size_t>(count));
  }
}

void CheckpointReader::read_stretch(const Stretch& stretch) {
  const auto& [source, index, into] = stretch;
  const std::uint64_t begin = source.offset + index * kHashedBytes;
  read_bytes(source.fd, source.piece->file, begin, into);
  if (content_hash(into) != source.piece->hashes[index])
    fail(source.piece->file,
         fmt::format("is not what was written in {} ({}), bytes {} to {}", quote(*source.tensor),
                     source.piece->placement.text(), begin, begin + into.size()));
}

void CheckpointReader::read_stretches(const std::vector<Stretch>& stretches) {
  on_threads(stretches.size(), num_threads_, [&](std::size_t i) { read_stretch(stretches[i]); });
}

void CheckpointReader::read_part(const Source& source, std::uint64_t begin,
                                 std::span<std::byte> into, std::vector<Stretch>& whole) {
  while (!into.empty()) {
    const std::uint64_t index = begin / kHashedBytes;
    const std::uint64_t first = index * kHashedBytes;
    const std::uint64_t size = std::min(kHashedBytes, source.bytes - first);
    const std::uint64_t count = std::min<std::uint64_t>(into.size(), first + size - begin);
    if (count == size) {
      whole.push_back({source, index, into.first(count)});
    } else {
      if (stretch_piece_ != source.piece || stretch_index_ != index) {
        stretch_piece_ = nullptr;
        stretch_.resize(size);
        read_stretch({source, index, stretch_});
        stretch_piece_ = source.piece;
        stretch_index_ = index;
      }
      std::memcpy(into.data(), stretch_.data() + (begin - first), count);
    }
    begin += count;
    into = into.subspan(count);
  }
}

void CheckpointReader::read_parts(const Wanted& wanted, std::vector<Stretch>& whole) {
  const auto& [tensor, placement, into] = wanted;
  const auto found = manifest_.tensors.find(tensor);
  if (found == manifest_.tensors.end())
    throw UsageError("the checkpoint '{}' has no {}", path_.string(), quote(tensor));
  const TensorRecord& record = found->second;
  const std::uint64_t element_bytes = bits_of(record.dtype) / 8;
  LOCKSTEP_CHECK(element_bytes > 0 && into.size() == piece_bytes(record.dtype, placement),
                 "{} bytes for {} of {}", into.size(), placement.text(), tensor);
  std::vector<mesh::Placement> pieces;
  for (const Piece& piece : record.pieces) pieces.push_back(piece.placement);
  std::vector<std::optional<Source>> sources(pieces.size());
  for (const mesh::Read& read :
       plan_piece_reads({tensor, record.shape}, std::move(pieces), placement, reader_)) {
    auto& source = sources[static_cast<std::size_t>(read.holder)];
    if (!source)
      source =
          source_of(found->first, record, record.pieces[static_cast<std::size_t>(read.holder)]);
    read_part(*source, static_cast<std::uint64_t>(read.source_offset) * element_bytes,
              into.subspan(static_cast<std::size_t>(read.destination_offset) * element_bytes,
                           static_cast<std::size_t>(read.count) * element_bytes),
              whole);
  }
}

void CheckpointReader::read(const std::string& tensor, const mesh::Placement& placement,
                            std::span<std::byte> into) {
  const Wanted one{tensor, placement, into};
  read({&one, 1});
}

void CheckpointReader::read(std::span<const Wanted> all) {
  std::vector<Stretch> whole;
  for (const Wanted& wanted : all) read_parts(wanted, whole);
  read_stretches(whole);
}

std::string CheckpointReader::read_text_file(const std::string& file) {
  if (!manifest_.files.contains(file))
    throw UsageError("the checkpoint '{}' has no {}", path_.string(), quote(file));
  // Reads and compares in one go, so that the caller gets the bytes that were compared.
  return read_head(open_unread(file), file);
}

void CheckpointReader::check_files(int stride) {
  int index = 0;
  if (reader_ % stride == 0) check_complete(manifest_, fmt::format("'{}'", path_.string()));
  for (const auto& [name, record] : manifest_.files)
    if (index++ % stride == reader_ % stride) open(name);
}

std::vector<std::string> CheckpointReader::damages() {
  std::vector<std::string> found;
  const auto look = [&](const auto& at) {
    try {
      at();
    } catch (const DamagedCheckpoint& damage) {
      found.emplace_back(damage.what());
    }
  };
  look([&] { check_complete(manifest_, fmt::format("'{}'", path_.string())); });
  for (const auto& file : manifest_.files) look([&] { open(file.first); });
  std::vector<std::byte> stretch;
  for (const auto& tensor : manifest_.tensors)
    for (const Piece& piece : tensor.second.pieces) {
      // One sentence is enough for a file that is missing as a whole.
      if (!files_.contains(piece.file)) continue;
      std::optional<Source> source;
      look([&] { source = source_of(tensor.first, tensor.second, piece); });
      for (std::uint64_t i = 0; source && i < piece.hashes.size(); ++i) {
        stretch.resize(std::min(kHashedBytes, source->bytes - i * kHashedBytes));
        look([&] { read_stretch({*source, i, stretch}); });
      }
    }
  return found;
}

UsableCheckpoint newest_usable(const std::filesystem::path& run_folder) {
  return newest_usable(list_checkpoints(run_folder));
}

UsableCheckpoint newest_usable(std::vector<Checkpoint> all) {
  UsableCheckpoint usable;
  for (; !all.empty(); all.pop_back()) {
    try {
      CheckpointReader(all.back().path).check_files();
      usable.checkpoint = std::move(all.back());
      break;
    } catch (const DamagedCheckpoint& damage) {
      usable.damages.emplace_back(damage.what());
    }
  }
  return usable;
}

namespace {

template <typename Value>
Value value_at(const std::byte* bytes) {
  Value value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// Nothing for types that are no floating-point numbers.
std::optional<double> number_at(DType dtype, const std::byte* bytes) {
  switch (dtype) {
    case DType::f64: return value_at<double>(bytes);
    case DType::f32: return value_at<float>(bytes);
    case DType::bf16: return to_float(value_at<BFloat16>(bytes));
    case DType::f16: return to_float(value_at<Float16>(bytes));
    default: return std::nullopt;
  }
}

// Adds the differences in one stretch of both tensors.
void add_differences(DType dtype, const std::vector<std::byte>& a, const std::vector<std::byte>& b,
                     TensorDifference& difference, bool& no_number) {
  const std::size_t size = bits_of(dtype) / 8;
  for (std::size_t at = 0; at < a.size(); at += size) {
    if (std::memcmp(a.data() + at, b.data() + at, size) == 0) continue;
    ++difference.differing;
    const auto first = number_at(dtype, a.data() + at), second = number_at(dtype, b.data() + at);
    if (!first) continue;
    const double distance = std::abs(*first - *second);
    no_number = no_number || std::isnan(distance);
    difference.largest = std::max(difference.largest.value_or(0), distance);
  }
}

std::optional<TensorDifference> difference_of(CheckpointReader& first, CheckpointReader& second,
                                              const std::string& name) {
  const TensorRecord* const a = first.find(name);
  const TensorRecord* const b = second.find(name);
  using Kind = TensorDifference::Kind;
  if (a == nullptr) return TensorDifference{.name = name, .kind = Kind::only_in_second};
  if (b == nullptr) return TensorDifference{.name = name, .kind = Kind::only_in_first};
  if (a->dtype != b->dtype || a->shape != b->shape)
    return TensorDifference{.name = name, .kind = Kind::another_form};
  const auto whole = mesh::Placement::full(a->shape);
  TensorDifference difference{
      .name = name, .kind = Kind::other_values, .elements = whole.elements()};
  const auto stretch =
      static_cast<std::int64_t>(kHashedBytes / std::max<std::uint64_t>(1, bits_of(a->dtype) / 8));
  bool no_number = false;
  for (std::int64_t begin = 0; begin < whole.elements(); begin += stretch) {
    const auto part =
        whole.cut_flat(mesh::Interval{begin, std::min(begin + stretch, whole.elements())});
    std::vector<std::byte> mine(piece_bytes(a->dtype, part)), other(mine.size());
    first.read(name, part, mine);
    second.read(name, part, other);
    add_differences(a->dtype, mine, other, difference, no_number);
  }
  if (difference.differing == 0) return std::nullopt;
  if (no_number) difference.largest.reset();
  return difference;
}

}  // namespace

void compare(CheckpointReader& first, CheckpointReader& second,
             const std::function<void(const TensorDifference&)>& visit) {
  std::set<std::string> names;
  for (const CheckpointReader* reader : {&first, &second})
    for (const auto& [name, record] : reader->manifest().tensors) names.insert(name);
  for (const std::string& name : names)
    if (const auto difference = difference_of(first, second, name)) visit(*difference);
}

}  // namespace lockstep::checkpoint
