#include <lockstep/checkpoint/format/manifest.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>
#include <vector>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/version.h>
#include <lockstep/checkpoint/safetensors/header.h>
#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/checkpoint/safetensors/strict_json.h>
#include <lockstep/mesh/placement/read_plan.h>

namespace lockstep::checkpoint {

namespace {

using nlohmann::json;

constexpr int kStateDepth = 3;

// Numbers are written with as many digits as bring them back; infinities and NaNs, which JSON does
// not have, as their bits.
json exact(double value) {
  if (std::isfinite(value)) return value;
  return fmt::format("{:016x}", std::bit_cast<std::uint64_t>(value));
}

double read_exact(const JsonPlace& place, const json& value) {
  if (value.is_number()) return value.get<double>();
  const std::string& digits = place.text();
  std::uint64_t bits = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), bits, 16);
  const auto number = std::bit_cast<double>(bits);
  if (error != std::errc() || end != digits.data() + digits.size() || digits.size() != 16 ||
      std::isfinite(number))
    place.fail(fmt::format("{} is not a number", quote(digits)));
  return number;
}

json optional_json(const std::optional<double>& value) {
  return value ? exact(*value) : json(nullptr);
}

std::optional<double> read_optional(const JsonPlace& top, const char* key) {
  const JsonPlace place = top.at(key);
  const json& value = top.object()[key];
  if (value.is_null()) return std::nullopt;
  return read_exact(place, value);
}

}  // namespace

std::string to_text(const TrainingState& state) {
  json values = json::object();
  for (const auto& [name, value] : state.values) values[name] = exact(value);
  const json root = {
      {"step", state.step},
      {"data",
       {{"epoch", state.data.epoch}, {"position", state.data.position}, {"size", state.data.size}}},
      {"seed", state.seed},
      {"samples_seen", state.samples_seen},
      {"last_loss", optional_json(state.last_loss)},
      {"values", std::move(values)},
      {"config", state.config}};
  try {
    return root.dump();
  } catch (const json::type_error&) {
    throw UsageError("the training state cannot be written: its config, or the name of a value, is "
                     "not UTF-8");
  }
}

TrainingState parse_state(std::string_view text, const std::string& file) {
  const json root = parse_strictly(text, file, kStateDepth);
  return state_at(JsonPlace(file, root));
}

TrainingState state_at(const JsonPlace& top) {
  TrainingState state;
  state.step = top.at("step").integer<std::int64_t>(0);
  state.data.epoch = top.at("data").at("epoch").integer<std::int64_t>(0);
  state.data.position = top.at("data").at("position").integer<std::int64_t>(0);
  state.data.size = top.at("data").at("size").integer<std::int64_t>(0);
  state.seed = top.at("seed").integer<std::uint64_t>();
  state.samples_seen = top.at("samples_seen").integer<std::int64_t>(0);
  state.last_loss = read_optional(top, "last_loss");
  const JsonPlace values = top.at("values");
  for (const auto& [name, value] : values.object().items())
    state.values[name] = read_exact(values.at(name), value);
  state.config = top.at("config").text();
  return state;
}

namespace {

using nlohmann::json;

constexpr const char* kFormat = "lockstep-checkpoint";
constexpr int kVersion = 2;
constexpr int kManifestDepth = 8;

constexpr std::string_view kBeforeHash = ",\n \"hash\": \"";
constexpr std::string_view kAfterHash = "\"\n}\n";
constexpr std::size_t kHashDigits = 32;
constexpr std::size_t kSealBytes = kBeforeHash.size() + kHashDigits + kAfterHash.size();

std::string json_text(const std::string& text) {
  try {
    return json(text).dump();
  } catch (const json::type_error&) {
    throw UsageError("the name {} is not UTF-8, so that no checkpoint can have it", quote(text));
  }
}

std::string interval_text(mesh::Interval interval) {
  return fmt::format("[{}, {}]", interval.begin, interval.end);
}

// A dim that the text does not mention is whole.
std::string placement_text(const mesh::Placement& placement,
                           const std::vector<std::int64_t>& shape) {
  std::string text;
  if (placement.shape() != shape)
    text += fmt::format(R"(, "as": [{}])", fmt::join(placement.shape(), ", "));
  if (!placement.has_whole_box_of_tensor()) {
    std::vector<std::string> sides;
    for (const mesh::Interval& side : placement.box()) sides.push_back(interval_text(side));
    text += fmt::format(R"(, "box": [{}])", fmt::join(sides, ", "));
  }
  if (!placement.whole_box())
    text += fmt::format(R"(, "range": {})", interval_text(placement.range()));
  return text;
}

std::string piece_text(const Piece& piece, const std::vector<std::int64_t>& shape) {
  std::vector<std::string> hashes;
  for (const ContentHash& hash : piece.hashes) hashes.push_back(json_text(hash.text()));
  return fmt::format(R"({{"file": {}{}, "hashes": [{}]}})", json_text(piece.file),
                     placement_text(piece.placement, shape), fmt::join(hashes, ", "));
}

std::string tensor_text(const std::string& name, const TensorRecord& tensor) {
  std::vector<std::string> pieces;
  for (const Piece& piece : tensor.pieces) pieces.push_back(piece_text(piece, tensor.shape));
  return fmt::format("  {}: {{\"dtype\": \"{}\", \"shape\": [{}], \"pieces\": [\n   {}]}}",
                     json_text(name), checkpoint::name(tensor.dtype), fmt::join(tensor.shape, ", "),
                     fmt::join(pieces, ",\n   "));
}

ContentHash hash_at(const JsonPlace& place) {
  const auto hash = ContentHash::parse(place.text());
  if (!hash) place.fail("not a hash of 32 hexadecimal digits");
  return *hash;
}

std::vector<std::int64_t> numbers_at(const JsonPlace& place) {
  std::vector<std::int64_t> numbers;
  for (std::size_t i = 0; i < place.array_size(); ++i)
    numbers.push_back(place.at(i).integer<std::int64_t>(0));
  return numbers;
}

mesh::Interval interval_at(const JsonPlace& place) {
  const auto numbers = numbers_at(place);
  if (numbers.size() != 2) place.fail("not a begin and an end");
  return {numbers[0], numbers[1]};
}

mesh::Placement placement_at(const JsonPlace& place, DType dtype,
                             const std::vector<std::int64_t>& shape) {
  const json& keys = place.object();
  try {
    const auto whole = mesh::Placement::full(shape);
    auto placement = whole;
    if (keys.contains("as")) placement = mesh::Placement::full(numbers_at(place.at("as")));
    if (placement.logical_elements() != whole.logical_elements())
      place.fail("\"as\" is a shape of another number of elements");
    if (keys.contains("box")) {
      const JsonPlace box = place.at("box");
      if (box.array_size() != placement.shape().size()) box.fail("not a side for each dim");
      for (std::size_t dim = 0; dim < box.array_size(); ++dim)
        placement = placement.cut_dim(static_cast<int>(dim), interval_at(box.at(dim)));
    }
    if (keys.contains("range")) placement = placement.cut_flat(interval_at(place.at("range")));
    piece_bytes(dtype, whole);  // which must be a number that fits
    return placement;
  } catch (const UsageError& error) {
    place.fail(error.what());
  }
}

// Nothing outside of the checkpoint's folder is ever looked at.
void check_file_name(const JsonPlace& place, const std::string& name) {
  if (name.empty() || name.front() == '.' || name.find('/') != std::string::npos ||
      name == kManifestFile)
    place.fail(fmt::format("{} is not the name of a file of a checkpoint", quote(name)));
}

TensorRecord tensor_at(const JsonPlace& place, const std::map<std::string, FileRecord>& files) {
  TensorRecord tensor;
  const auto dtype = dtype_from_name(place.at("dtype").text());
  if (!dtype) place.at("dtype").fail("no type of elements that there is");
  if (bits_of(*dtype) % 8 != 0)
    place.at("dtype").fail("a type of less than a byte, which no checkpoint of ours has");
  tensor.dtype = *dtype;
  tensor.shape = numbers_at(place.at("shape"));
  const JsonPlace pieces = place.at("pieces");
  for (std::size_t i = 0; i < pieces.array_size(); ++i) {
    const JsonPlace at = pieces.at(i);
    Piece piece{.file = at.at("file").text(),
                .placement = placement_at(at, tensor.dtype, tensor.shape)};
    if (!files.contains(piece.file)) at.at("file").fail("not one of the checkpoint's files");
    const JsonPlace hashes = at.at("hashes");
    const std::uint64_t bytes = piece_bytes(tensor.dtype, piece.placement);
    if (hashes.array_size() != num_hashes(bytes))
      hashes.fail(fmt::format("has {} hashes for a piece of {} bytes", hashes.array_size(), bytes));
    for (std::size_t j = 0; j < hashes.array_size(); ++j)
      piece.hashes.push_back(hash_at(hashes.at(j)));
    tensor.pieces.push_back(std::move(piece));
  }
  return tensor;
}

std::string_view unsealed(std::string_view text, const std::string& file) {
  const auto damaged = [&](const char* what) {
    throw DamagedCheckpoint("{} {}: it is damaged, or was changed since it was written", file,
                            what);
  };
  if (text.size() < kSealBytes) damaged("is cut off");
  const std::string_view body = text.substr(0, text.size() - kSealBytes);
  const std::string_view seal = text.substr(body.size());
  if (!seal.starts_with(kBeforeHash) || !seal.ends_with(kAfterHash))
    damaged("does not end in its hash");
  if (seal.substr(kBeforeHash.size(), kHashDigits) != content_hash(body).text())
    damaged("does not have the contents that its hash is of");
  return body;
}

}  // namespace

std::string piece_name(const std::string& tensor, const mesh::Placement& placement) {
  return placement.whole_tensor() ? tensor : fmt::format("{} {}", tensor, placement.text());
}

std::uint64_t piece_bytes(DType dtype, const mesh::Placement& placement) {
  const std::int64_t shape[] = {placement.elements()};
  return tensor_bytes(dtype, shape, "a piece of a tensor");
}

std::uint64_t num_hashes(std::uint64_t bytes) {
  return bytes / kHashedBytes + (bytes % kHashedBytes == 0 ? 0 : 1);
}

void add(Manifest& to, Manifest part) {
  for (auto& [name, file] : part.files)
    if (!to.files.emplace(name, file).second)
      throw UsageError("two ranks wrote the file {} of a checkpoint", quote(name));
  for (auto& [name, tensor] : part.tensors) {
    const auto [found, is_new] = to.tensors.try_emplace(name, tensor);
    if (is_new) continue;
    TensorRecord& known = found->second;
    if (known.dtype != tensor.dtype || known.shape != tensor.shape)
      throw UsageError("ranks differ in what {} is: {} {} and {} {}", quote(name),
                       checkpoint::name(known.dtype), shape_text(known.shape),
                       checkpoint::name(tensor.dtype), shape_text(tensor.shape));
    std::ranges::move(tensor.pieces, std::back_inserter(known.pieces));
  }
}

void check_complete(const Manifest& manifest, const std::string& file) {
  for (const auto& [name, tensor] : manifest.tensors) {
    std::int64_t held = 0;
    try {
      held = covered_elements(tensor);
    } catch (const DamagedCheckpoint& error) {
      throw DamagedCheckpoint("{}: {}: {}", file, quote(name), error.what());
    }
    const std::int64_t elements = mesh::Placement::full(tensor.shape).elements();
    if (held < elements)
      throw DamagedCheckpoint("{}: of the {} elements of {} there are {}", file, elements,
                              quote(name), held);
  }
}

std::string to_text(const Manifest& manifest) {
  std::vector<std::string> files;
  for (const auto& [name, file] : manifest.files)
    files.push_back(fmt::format(R"(  {}: {{"bytes": {}, "head_bytes": {}, "hash": "{}"}})",
                                json_text(name), file.bytes, file.head_bytes, file.hash.text()));
  std::vector<std::string> tensors;
  for (const auto& [name, tensor] : manifest.tensors) tensors.push_back(tensor_text(name, tensor));
  const std::string body =
      fmt::format("{{\n \"format\": \"{}\",\n \"version\": {},\n \"written_by\": \"lockstep "
                  "{}\",\n \"state\": {},\n \"files\": {{\n{}\n }},\n"
                  " \"tensors\": {{\n{}\n }}",
                  kFormat, kVersion, lockstep::version(), to_text(manifest.state),
                  fmt::join(files, ",\n"), fmt::join(tensors, ",\n"));
  return seal_manifest(body);
}

std::string seal_manifest(std::string_view body) {
  return fmt::format("{}{}{}{}", body, kBeforeHash, content_hash(body).text(), kAfterHash);
}

Manifest parse_manifest(std::string_view text, const std::string& file) {
  const std::string body = fmt::format("{}\n}}", unsealed(text, file));
  const json root = parse_strictly(body, file, kManifestDepth);
  const JsonPlace top(file, root);
  if (top.at("format").text() != kFormat)
    top.at("format").fail("this is not the manifest of a Lockstep checkpoint");
  if (const auto version = top.at("version").integer<int>(); version != kVersion)
    top.at("version").fail(fmt::format("it is of version {}, and this program reads version {}: "
                                       "use the program that wrote it",
                                       version, kVersion));
  Manifest manifest{.state = state_at(top.at("state")), .files = {}, .tensors = {}};
  const JsonPlace files = top.at("files");
  for (const auto& item : files.object().items()) {
    const JsonPlace place = files.at(item.key());
    check_file_name(place, item.key());
    FileRecord record{.bytes = place.at("bytes").integer<std::uint64_t>(),
                      .head_bytes = place.at("head_bytes").integer<std::uint64_t>(),
                      .hash = hash_at(place.at("hash"))};
    if (record.head_bytes > record.bytes) place.fail("has more first bytes than bytes");
    manifest.files[item.key()] = record;
  }
  const JsonPlace tensors = top.at("tensors");
  for (const auto& item : tensors.object().items())
    manifest.tensors[item.key()] = tensor_at(tensors.at(item.key()), manifest.files);
  return manifest;
}

namespace {

using mesh::Interval;
using mesh::Placement;

constexpr std::int64_t kMostRuns = 1 << 22;

// The intervals may come in any order and overlap.
std::int64_t size_of_union(std::vector<Interval> intervals) {
  std::ranges::sort(intervals, {}, &Interval::begin);
  std::int64_t size = 0;
  std::int64_t end = 0;
  for (const Interval& one : intervals) {
    size += std::max<std::int64_t>(0, one.end - std::max(one.begin, end));
    end = std::max(end, one.end);
  }
  return size;
}

bool are_apart(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  for (std::size_t dim = 0; dim < a.size(); ++dim)
    if (a[dim].end <= b[dim].begin || b[dim].end <= a[dim].begin) return true;
  return false;
}

// A box, and the ranges of its flat order that are held.
struct BoxRanges {
  std::vector<Interval> box;
  std::vector<Interval> ranges;
};

std::vector<BoxRanges> by_box(const std::vector<Placement>& pieces) {
  std::map<std::vector<std::int64_t>, BoxRanges> found;
  for (const Placement& piece : pieces) {
    std::vector<std::int64_t> corners;
    for (const Interval& side : piece.box()) corners.insert(corners.end(), {side.begin, side.end});
    BoxRanges& same = found[corners];
    same.box = piece.box();
    same.ranges.push_back(piece.range());
  }
  std::vector<BoxRanges> all;
  for (auto& [corners, ranges] : found) all.push_back(std::move(ranges));
  return all;
}

// Whether no two boxes overlap. They are in the order of their first corners: a box that begins
// behind another along the first dim is apart from it, and so are all boxes after it.
bool all_apart(const std::vector<BoxRanges>& boxes) {
  for (std::size_t i = 0; i < boxes.size(); ++i)
    for (std::size_t k = i + 1; k < boxes.size(); ++k) {
      if (!boxes[i].box.empty() && boxes[k].box[0].begin >= boxes[i].box[0].end) break;
      if (!are_apart(boxes[i].box, boxes[k].box)) return false;
    }
  return true;
}

// The pieces as parts of one shape; nothing where they were cut along dims of different shapes.
std::optional<std::vector<Placement>> in_one_shape(const std::vector<Placement>& pieces) {
  const Placement* cut = &pieces.front();
  for (const Placement& piece : pieces)
    if (!piece.has_whole_box_of_tensor()) cut = &piece;
  std::vector<Placement> alike;
  for (const Placement& piece : pieces) {
    if (piece.shape() != cut->shape() && !piece.has_whole_box_of_tensor()) return std::nullopt;
    alike.push_back(piece.shape() == cut->shape() ? piece : piece.in_shape(cut->shape()));
  }
  return alike;
}

// The piece takes at most this many stretches of the tensor's flat order.
std::int64_t most_runs(const Placement& piece) {
  const std::vector<std::int64_t>& shape = piece.shape();
  std::size_t dim = shape.size();
  while (dim > 0 && piece.box()[dim - 1].size() == shape[dim - 1]) --dim;
  std::int64_t runs = 1;
  for (std::size_t outer = 0; outer + 1 < dim; ++outer) runs *= piece.box()[outer].size();
  return std::min(runs, piece.elements());
}

std::int64_t covered_by_runs(const std::vector<Placement>& pieces) {
  std::vector<Interval> runs;
  std::int64_t most = 0;
  for (const Placement& piece : pieces) {
    most += most_runs(piece);
    if (most > kMostRuns)
      throw DamagedCheckpoint("its pieces overlap in more than {} places", kMostRuns);
    mesh::for_each_run(Placement::full(piece.shape()), piece, [&](const mesh::SharedRun& run) {
      runs.push_back({run.a_offset, run.a_offset + run.count});
    });
  }
  return size_of_union(std::move(runs));
}

}  // namespace

std::int64_t covered_elements(const TensorRecord& tensor) {
  std::vector<Placement> pieces;
  for (const Piece& piece : tensor.pieces)
    if (!piece.placement.empty()) pieces.push_back(piece.placement);
  if (pieces.empty()) return 0;
  if (const auto alike = in_one_shape(pieces)) {
    std::vector<BoxRanges> boxes = by_box(*alike);
    if (all_apart(boxes)) {
      std::int64_t covered = 0;
      for (BoxRanges& one : boxes) covered += size_of_union(std::move(one.ranges));
      return covered;
    }
  }
  return covered_by_runs(pieces);
}

}  // namespace lockstep::checkpoint
