// lockstep-hashes.json: what the files of an exported model held when they were written. Hugging
// Face's formats have no checksums; with this file beside them, a changed bit is found when it is
// read.
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include <lockstep/checkpoint/content_hash.h>

namespace lockstep::checkpoint {

inline constexpr const char* kHashesFile = "lockstep-hashes.json";

// Threading: as a container.
class FolderHashes {
 public:
  // Those of a folder; of no file where it has no lockstep-hashes.json. UsageError for a damaged
  // one.
  static FolderHashes read(const std::filesystem::path& folder);
  // Of its text; an error begins with `file`.
  static FolderHashes parse(std::string_view text, const std::string& file);

  void add_text(const std::string& file, std::string_view text);
  void add_tensor(const std::string& file, const std::string& tensor,
                  std::span<const std::byte> bytes);
  // The contents of lockstep-hashes.json.
  std::string text() const;

  // Whether it has any of a file with tensors.
  bool has_tensors_of(const std::string& file) const { return tensors_.contains(file); }

  // UsageError that names the file, and the tensor, where it is not what was added under that name,
  // or nothing was. Without a lockstep-hashes.json everything passes.
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
