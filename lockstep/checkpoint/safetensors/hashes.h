// lockstep-hashes.json: what the files of an exported model held when they were written. Hugging
// Face's formats have no checksums; with this file beside them, a changed bit is found when it is
// read.
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include <lockstep/checkpoint/safetensors/content_hash.h>

namespace lockstep::checkpoint {

inline constexpr const char* kHashesFile = "lockstep-hashes.json";

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

  // These throw a UsageError, which names the file and the tensor, where the bytes are not those
  // that were added under that name, or where none were.
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

}  // namespace lockstep::checkpoint
