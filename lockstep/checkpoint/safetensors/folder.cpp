#include <lockstep/checkpoint/safetensors/folder.h>

#include <algorithm>
#include <bit>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/base/file.h>
#include <lockstep/checkpoint/safetensors/header.h>
#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/checkpoint/safetensors/strict_json.h>

namespace lockstep::checkpoint {

static_assert(std::endian::native == std::endian::little, "tensors are read as they are");

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : file_(path), header_(parse_header(file_.bytes(), path.string())) {}

std::span<const std::byte> SafetensorsFile::bytes(const TensorEntry& entry) const {
  const auto data = file_.bytes().subspan(header_.data_offset);
  LOCKSTEP_CHECK(entry.begin <= entry.end && entry.end <= data.size(), "an entry of another file");
  return data.subspan(entry.begin, entry.size_bytes());
}

namespace {

constexpr int kDepth = 3;

std::map<std::string, ContentHash> hashes_at(const JsonPlace& place) {
  std::map<std::string, ContentHash> hashes;
  for (const auto& [name, value] : place.object().items()) {
    const auto hash = ContentHash::parse(place.at(name).text());
    if (!hash) place.at(name).fail("not a hash of 32 hexadecimal digits");
    hashes.emplace(name, *hash);
  }
  return hashes;
}

nlohmann::json texts_of(const std::map<std::string, ContentHash>& hashes) {
  nlohmann::json texts = nlohmann::json::object();
  for (const auto& [name, hash] : hashes) texts[name] = hash.text();
  return texts;
}

}  // namespace

FolderHashes FolderHashes::read(const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / kHashesFile;
  FolderHashes hashes;
  if (is_there(file))
    hashes = parse(read_text(file, kLargestHeaderBytes), fmt::format("'{}'", file.string()));
  hashes.folder_ = folder;
  return hashes;
}

FolderHashes FolderHashes::parse(std::string_view text, const std::string& file) {
  const nlohmann::json json = parse_strictly(text, file, kDepth);
  const JsonPlace root(file, json);
  FolderHashes hashes;
  hashes.there_ = true;
  hashes.texts_ = hashes_at(root.at("texts"));
  const JsonPlace tensors = root.at("tensors");
  for (const auto& [name, value] : tensors.object().items())
    hashes.tensors_.emplace(name, hashes_at(tensors.at(name)));
  return hashes;
}

void FolderHashes::add_text(const std::string& file, std::string_view text) {
  texts_[file] = content_hash(text);
}

void FolderHashes::add_tensor(const std::string& file, const std::string& tensor,
                              std::span<const std::byte> bytes) {
  tensors_[file][tensor] = content_hash(bytes);
}

std::string FolderHashes::text() const {
  nlohmann::json tensors = nlohmann::json::object();
  for (const auto& [file, hashes] : tensors_) tensors[file] = texts_of(hashes);
  return nlohmann::json{{"texts", texts_of(texts_)}, {"tensors", tensors}}.dump(1) + '\n';
}

void FolderHashes::check_text(const std::string& file, std::string_view text) const {
  if (there_) check(quote(file), texts_, file, content_hash(text));
}

void FolderHashes::check_tensor(const std::string& file, const std::string& tensor,
                                std::span<const std::byte> bytes) const {
  if (!there_) return;
  static const std::map<std::string, ContentHash> none;
  const auto known = tensors_.find(file);
  check(fmt::format("the tensor {} in {}", quote(tensor), quote(file)),
        known == tensors_.end() ? none : known->second, tensor, content_hash(bytes));
}

void FolderHashes::check(const std::string& what, const std::map<std::string, ContentHash>& known,
                         const std::string& name, ContentHash hash) const {
  const auto place = known.find(name);
  if (place != known.end() && place->second == hash) return;
  throw UsageError("{} in the folder '{}' {}: the file is damaged, or was changed since 'lockstep "
                   "ckpt export' wrote it; if you changed it on purpose, remove {}",
                   what, folder_.string(),
                   place == known.end()
                       ? fmt::format("has no hash in {}", kHashesFile)
                       : fmt::format("does not have the hash that {} has of it", kHashesFile),
                   kHashesFile);
}

namespace {

constexpr int kIndexDepth = 8;  // "metadata" may hold anything

bool stays_in_folder(const std::string& name) {
  return !name.empty() && name != "." && name.find("..") == std::string::npos &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
}

[[noreturn]] void fail_without_model(const std::filesystem::path& folder) {
  std::string found;
  std::error_code unreadable;
  for (auto it = std::filesystem::directory_iterator(folder, unreadable);
       !unreadable && it != std::filesystem::directory_iterator(); it.increment(unreadable)) {
    const auto extension = it->path().extension();
    if (extension == ".safetensors")
      found = fmt::format(". It has '{}': name that file itself", it->path().filename().string());
    else if (found.empty() && (extension == ".bin" || extension == ".pt" || extension == ".pth"))
      found =
          fmt::format(". '{}' may be a pickle, which can run code and is never read: convert it "
                      "to safetensors",
                      it->path().filename().string());
  }
  throw UsageError("'{}' has neither {} nor {}{}", folder.string(), kModelFile, kModelIndex, found);
}

}  // namespace

std::map<std::string, std::string> parse_index(std::string_view text, const std::string& file) {
  const nlohmann::json root = parse_strictly(text, file, kIndexDepth);
  const JsonPlace map = JsonPlace(file, root).at("weight_map");
  std::map<std::string, std::string> result;
  for (const auto& [tensor, value] : map.object().items()) {
    const JsonPlace place = map.at(tensor);
    if (!stays_in_folder(place.text()))
      place.fail(fmt::format("{} is not the name of a file in the index's own folder",
                             quote(place.text())));
    result.emplace(tensor, place.text());
  }
  return result;
}

std::span<const std::byte> StoredTensor::bytes() const {
  const std::span<const std::byte> bytes = file->bytes(*entry);
  hashes->check_tensor(file->path().filename().string(), entry->name, bytes);
  return bytes;
}

SafetensorsFolder::SafetensorsFolder(std::filesystem::path path) : path_(std::move(path)) {
  std::error_code error;
  const bool is_folder = std::filesystem::is_directory(path_, error);
  folder_ = is_folder ? path_ : path_.parent_path();
  hashes_ = FolderHashes::read(folder_);
  // A file by itself may lie beside an exported model and be none of its files.
  if (!is_folder && path_.extension() != ".json" &&
      !hashes_.has_tensors_of(path_.filename().string()))
    hashes_ = FolderHashes();
  if (is_folder) {
    if (std::filesystem::exists(path_ / kModelFile, error))
      open_file(path_ / kModelFile);
    else if (std::filesystem::exists(path_ / kModelIndex, error))
      open_index(path_ / kModelIndex);
    else
      fail_without_model(path_);
  } else if (path_.extension() == ".json") {
    open_index(path_);
  } else {
    open_file(path_);
  }
  std::sort(tensors_.begin(), tensors_.end(),
            [](const auto& a, const auto& b) { return a.name() < b.name(); });
}

void SafetensorsFolder::open_file(const std::filesystem::path& file) {
  const SafetensorsFile& opened = files_.emplace(file.string(), file).first->second;
  for (const TensorEntry& entry : opened.entries()) tensors_.push_back({&opened, &entry, &hashes_});
}

void SafetensorsFolder::open_index(const std::filesystem::path& index) {
  const std::string file = fmt::format("index '{}'", index.string());
  for (const auto& [tensor, name] : parse_index(read_text(index, kLargestHeaderBytes), file)) {
    auto place = files_.find(name);
    if (place == files_.end()) {
      const std::filesystem::path shard = index.parent_path() / name;
      if (std::error_code unknown; !std::filesystem::exists(shard, unknown))
        throw UsageError("{} puts the tensor {} into '{}', which is not there: the model is "
                         "incomplete; get its other files",
                         file, quote(tensor), shard.string());
      place = files_.emplace(name, shard).first;
    }
    const TensorEntry* const entry = place->second.find(tensor);
    if (entry == nullptr)
      throw UsageError("{} puts the tensor {} into '{}', which has no such tensor: these files do "
                       "not belong together",
                       file, quote(tensor), place->second.path().string());
    tensors_.push_back({&place->second, entry, &hashes_});
  }
}

const StoredTensor* SafetensorsFolder::find(std::string_view name) const {
  const auto place = std::lower_bound(
      tensors_.begin(), tensors_.end(), name,
      [](const StoredTensor& tensor, std::string_view n) { return tensor.name() < n; });
  return place == tensors_.end() || place->name() != name ? nullptr : &*place;
}

std::string SafetensorsFolder::text_file(const std::string& name) const {
  std::string text = read_text(folder_ / name, kLargestHeaderBytes);
  hashes_.check_text(name, text);
  return text;
}

}  // namespace lockstep::checkpoint
