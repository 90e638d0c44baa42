// Reads Hugging Face's safetensors: named arrays in one file behind a JSON header, with no code in
// them. A model is one such file, or several and an index. writer.h writes them.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/base/file.h>
#include <lockstep/checkpoint/safetensors/content_hash.h>
#include <lockstep/checkpoint/safetensors/header.h>

namespace lockstep::checkpoint {

// One safetensors file.
//
// Ownership: maps the file; entries and spans are valid until it is destroyed or moved from.
// Threading: read-only. Failure: as parse_header and MappedFile, in the constructor.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  const std::vector<TensorEntry>& entries() const { return header_.entries; }
  const Metadata& metadata() const { return header_.metadata; }
  // Null where no tensor has that name.
  const TensorEntry* find(std::string_view name) const { return header_.find(name); }

  // The bytes of one of the file's own entries. They are aligned only where the writer aligned
  // them.
  std::span<const std::byte> bytes(const TensorEntry& entry) const;

 private:
  MappedFile file_;
  SafetensorsHeader header_;
};

inline constexpr const char* kHashesFile = "lockstep-hashes.json";

// The contents of lockstep-hashes.json, which lies beside an exported model and tells what its
// files held when they were written. Hugging Face's formats have no checksums; with this file, a
// changed bit is found when it is read.
//
// Threading: one thread at a time changes it; any number may check.
class FolderHashes {
 public:
  // Reads the hashes of a folder. The result is empty, and passes everything, where the folder has
  // no lockstep-hashes.json. Throws UsageError for a damaged one.
  static FolderHashes read(const std::filesystem::path& folder);
  // Reads hashes from the text of such a file. Its UsageErrors begin with `file`.
  static FolderHashes parse(std::string_view text, const std::string& file);

  void add_text(const std::string& file, std::string_view text);
  void add_tensor(const std::string& file, const std::string& tensor,
                  std::span<const std::byte> bytes);
  // The contents of lockstep-hashes.json.
  std::string text() const;

  // Tells whether it has hashes of the tensors in this file.
  bool has_tensors_of(const std::string& file) const { return tensors_.contains(file); }

  // These throw a UsageError, which names the file and the tensor, where other bytes were added
  // under that name, or none.
  void check_text(const std::string& file, std::string_view text) const;
  void check_tensor(const std::string& file, const std::string& tensor,
                    std::span<const std::byte> bytes) const;

 private:
  void check(const std::string& what, const std::map<std::string, ContentHash>& known,
             const std::string& name, ContentHash hash) const;

  std::filesystem::path folder_;
  bool there_ = false;  // whether the folder has a lockstep-hashes.json
  std::map<std::string, ContentHash> texts_;
  std::map<std::string, std::map<std::string, ContentHash>> tensors_;  // by file
};

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
  // Throws a UsageError where the bytes do not have the hash of the folder's lockstep-hashes.json.
  std::span<const std::byte> bytes() const;
};

// One view over all tensors of a model. The index of a sharded model decides: tensors that it does
// not list are not looked at, nor are other files of the folder.
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
