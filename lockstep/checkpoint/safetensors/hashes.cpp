#include <lockstep/checkpoint/safetensors/hashes.h>

#include <lockstep/base/is_there.h>
#include <lockstep/checkpoint/safetensors/header.h>
#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/checkpoint/safetensors/strict_json.h>

namespace lockstep::checkpoint {

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

}  // namespace lockstep::checkpoint
