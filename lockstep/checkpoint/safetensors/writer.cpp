#include <lockstep/checkpoint/safetensors/writer.h>

#include <algorithm>
#include <cstring>
#include <system_error>
#include <unordered_set>

#include <spdlog/fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/durable_file.h>
#include <lockstep/checkpoint/safetensors/quote.h>

namespace lockstep::checkpoint {

void check_free_space(const std::filesystem::path& folder, std::uint64_t bytes) {
  std::error_code unknown;
  const auto space = std::filesystem::space(folder, unknown);
  if (unknown || space.capacity == 0 || space.available >= bytes) return;
  constexpr double kMebi = 1 << 20;
  throw FileError(
      "not enough room in '{}': {} bytes ({:.1f} MiB) are to be written, {} ({:.1f} MiB)"
      " are free. Remove something, or choose a folder on a larger disk",
      folder.string(), bytes, static_cast<double>(bytes) / kMebi, space.available,
      static_cast<double>(space.available) / kMebi);
}

namespace {

using nlohmann::json;

constexpr std::size_t kAlignment = 8;
constexpr std::uint64_t kMuchData = 4 << 20;

// The text as JSON, with its quotes.
std::string json_text(const std::string& text) {
  try {
    return json(text).dump();
  } catch (const json::type_error&) {
    throw UsageError("{} cannot be written to a safetensors file: it is not UTF-8", quote(text));
  }
}

std::vector<TensorEntry> place(std::span<const TensorDeclaration> tensors) {
  std::vector<TensorEntry> entries;
  std::unordered_set<std::string_view> names;
  for (const TensorDeclaration& tensor : tensors) {
    if (tensor.name == "__metadata__")
      throw UsageError("a tensor cannot be called '__metadata__' in a safetensors file");
    if (!names.insert(tensor.name).second)
      throw UsageError("the tensor {} is to be written twice into one safetensors file",
                       quote(tensor.name));
    entries.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
  }
  std::stable_sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return bits_of(a.dtype) > bits_of(b.dtype);
  });
  std::uint64_t position = 0;
  for (TensorEntry& entry : entries) {
    entry.begin = position;
    const std::string what = fmt::format("tensor {}", quote(entry.name));
    const std::uint64_t bytes = tensor_bytes(entry.dtype, entry.shape, what);
    // Far below 2^63, so that no sum of these overflows before memory does.
    if (bytes > (std::uint64_t{1} << 62) - position)
      throw UsageError("{}: the tensors up to it have more than 2^62 bytes", what);
    position += bytes;
    entry.end = position;
  }
  return entries;
}

}  // namespace

SafetensorsLayout plan_safetensors(std::span<const TensorDeclaration> tensors,
                                   const Metadata& metadata) {
  SafetensorsLayout layout{.header = std::string(sizeof(std::uint64_t), '\0'),
                           .entries = place(tensors)};
  std::string& text = layout.header;
  text += '{';
  const char* separator = "";
  if (!metadata.empty()) {
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      text += separator + json_text(key) + ':' + json_text(value);
      separator = ",";
    }
    text += '}';
  }
  for (const TensorEntry& entry : layout.entries) {
    text += fmt::format(R"({}{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", separator,
                        json_text(entry.name), name(entry.dtype), fmt::join(entry.shape, ","),
                        entry.begin, entry.end);
    separator = ",";
  }
  text += '}';
  text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
  const std::uint64_t length = text.size() - sizeof length;
  if (length > kLargestHeaderBytes)
    throw UsageError("the names and shapes of {} tensors take {} bytes, and a safetensors file's "
                     "header has at most {}: write several files",
                     tensors.size(), length, kLargestHeaderBytes);
  std::memcpy(text.data(), &length, sizeof length);
  return layout;
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     std::span<const TensorDeclaration> tensors,
                                     const Metadata& metadata)
    : path_(path),
      layout_(plan_safetensors(tensors, metadata)),
      file_(path, layout_.file_bytes() < kMuchData ? DurableFile::Length::short_text
                                                   : DurableFile::Length::much_data) {
  check_free_space(path.has_parent_path() ? path.parent_path() : ".", layout_.file_bytes());
  file_.write(layout_.header);
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  const std::uint64_t declared = layout_.file_bytes() - layout_.header.size();
  if (bytes.size() > declared - written_)
    throw UsageError("'{}': {} bytes more than the {} of the tensors that were declared",
                     path_.string(), bytes.size() - (declared - written_), declared);
  file_.write(bytes);
  written_ += bytes.size();
}

void SafetensorsWriter::commit(DurableFile::Folder folder) {
  const std::uint64_t declared = layout_.file_bytes() - layout_.header.size();
  if (written_ != declared)
    throw UsageError("'{}': {} bytes were written of the {} of the tensors that were declared",
                     path_.string(), written_, declared);
  file_.commit(folder);
}

}  // namespace lockstep::checkpoint
