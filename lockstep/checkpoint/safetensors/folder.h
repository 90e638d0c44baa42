// The tensors of a model as Hugging Face stores it: one file, or several and an index.
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/checkpoint/safetensors/file.h>
#include <lockstep/checkpoint/safetensors/hashes.h>

namespace lockstep::checkpoint {

inline constexpr const char* kModelFile = "model.safetensors";
inline constexpr const char* kModelIndex = "model.safetensors.index.json";

// The "weight_map" of an index: tensor to file name. UsageError, which names `file`, for what is no
// index, and for file names that point out of the folder.
std::map<std::string, std::string> parse_index(std::string_view text, const std::string& file);

struct StoredTensor {
  const SafetensorsFile* file = nullptr;
  const TensorEntry* entry = nullptr;
  const FolderHashes* hashes = nullptr;

  const std::string& name() const { return entry->name; }
  // UsageError where they are not what the folder's lockstep-hashes.json has a hash of.
  std::span<const std::byte> bytes() const;
};

// One view over all of them. Of a sharded model the index decides: what its files hold besides is
// not looked at, nor are other files of the folder.
//
// Ownership: keeps the files mapped; what it hands out is valid until it is destroyed. Threading:
// read-only. Failure: UsageError in the constructor, for a path that holds no such model, a damaged
// file, or a tensor that the index has and its file has not.
class SafetensorsFolder {
 public:
  // A folder with model.safetensors or, where there is none, with an index; or one of these files
  // itself, under any name.
  explicit SafetensorsFolder(std::filesystem::path path);
  SafetensorsFolder(const SafetensorsFolder&) = delete;
  SafetensorsFolder& operator=(const SafetensorsFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // In the order of names.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  // Nothing where there is none of that name.
  const StoredTensor* find(std::string_view name) const;
  // Another file of the folder, such as config.json. UsageError where it cannot be read, or is not
  // what the folder's lockstep-hashes.json has a hash of.
  std::string text_file(const std::string& name) const;

 private:
  void open_file(const std::filesystem::path& file);
  void open_index(const std::filesystem::path& index);

  std::filesystem::path path_, folder_;
  FolderHashes hashes_;
  std::map<std::string, SafetensorsFile> files_;  // nodes stay where they are
  std::vector<StoredTensor> tensors_;
};

}  // namespace lockstep::checkpoint
