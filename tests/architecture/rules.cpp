#include "rules.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <optional>
#include <sstream>

#include "sources.h"
#include "table.h"

namespace lockstep::architecture {

namespace {

namespace fs = std::filesystem;

constexpr std::array kLibTorchFolders{"ATen/", "c10/", "torch/", "caffe2/"};
// The header for programs outside the tree: it includes every part's public headers, belongs to no
// part, and no file here includes it.
constexpr const char* kUmbrella = "lockstep/lockstep.h";
constexpr std::array kNamelessNames{"util", "utils", "helper", "helpers", "misc", "common"};

// The target of everything, which belongs to no part.
constexpr const char* kWholeTarget = "all";

// Parts whose names, or some of them, are not in the namespace of the part: programs write them
// most, or (recompute) a function has the part's name.
struct OtherNamespace {
  const char* folder;
  const char* name;
};
constexpr std::array kOtherNamespaces{OtherNamespace{"base", "lockstep"},
                                      OtherNamespace{"launch/rank_side", "lockstep"},
                                      OtherNamespace{"mesh", "lockstep"},
                                      OtherNamespace{"recompute", "lockstep"},
                                      OtherNamespace{"recompute", "lockstep::activations"},
                                      OtherNamespace{"parallel/shard/sizes", "lockstep"},
                                      OtherNamespace{"distributed", "lockstep"},
                                      OtherNamespace{"recovery", "lockstep"},
                                      OtherNamespace{"multi_node", "lockstep"},
                                      OtherNamespace{"train", "lockstep"}};
// The names that a program may take out of `lockstep` by one using-directive.
constexpr const char* kPublicNames = "lockstep::names";

bool is_source(const fs::path& file) {
  return file.extension() == ".h" || file.extension() == ".cpp" || file.extension() == ".cu" ||
         file.extension() == ".cuh";
}

// A part's name without the folder that only holds parts.
std::string short_name(std::string part) {
  const std::string holder = "parallel/";
  return part.starts_with(holder) ? part.substr(holder.size()) : part;
}

// The target of a row: "checkpoint/format" is checkpoint_format, "optim/*/plain" is optim_plain.
std::string target_of(const Part& part) {
  std::string name = short_name(part.name);
  if (const auto star = name.find("*/"); star != std::string::npos) name.erase(star, 2);
  std::ranges::replace(name, '/', '_');
  return name;
}

bool is_or_in(const std::string& name, const std::string& outer) {
  return name == outer || name.starts_with(outer + "::");
}

// Paths are relative to root and sorted, so a report is the same each time.
std::vector<fs::path> files_under(const fs::path& root, const fs::path& folder) {
  std::vector<fs::path> files;
  if (!fs::is_directory(root / folder)) return files;
  for (const auto& entry : fs::recursive_directory_iterator(root / folder))
    if (entry.is_regular_file()) files.push_back(fs::relative(entry.path(), root));
  std::sort(files.begin(), files.end());
  return files;
}

// The name of a file in the table: without the leading lockstep/.
std::string table_path(const fs::path& file) {
  const std::string text = file.generic_string();
  const std::string prefix = "lockstep/";
  return text.starts_with(prefix) ? text.substr(prefix.size()) : text;
}

struct Include {
  std::string header;
  bool quoted = false;
};

// The header of an #include line.
std::optional<Include> parse_include(const std::string& line) {
  std::istringstream stream(line);
  char hash = 0;
  std::string rest;
  stream >> hash;
  std::getline(stream >> std::ws, rest);
  const std::string directive = "include";
  if (hash != '#' || !rest.starts_with(directive)) return std::nullopt;
  const auto open = rest.find_first_not_of(" \t", directive.size());
  if (open == std::string::npos || (rest[open] != '<' && rest[open] != '"')) return std::nullopt;
  const bool quoted = rest[open] == '"';
  const auto close = rest.find(quoted ? '"' : '>', open + 1);
  if (close == std::string::npos) return std::nullopt;
  return Include{rest.substr(open + 1, close - open - 1), quoted};
}

// Whether the line calls getenv, std::getenv or secure_getenv.
bool reads_environment(const std::string& line) {
  const std::string name = "getenv";
  const auto at = line.find(name);
  if (at == std::string::npos) return false;
  const auto after = line.find_first_not_of(' ', at + name.size());
  return after != std::string::npos && line[after] == '(';
}

class Checker {
 public:
  explicit Checker(fs::path root)
      : root_(std::move(root)), table_(read_table(root_ / "ARCHITECTURE.md")) {}

  std::vector<std::string> run() {
    for (const std::string& mistake : table_.mistakes)
      found_.push_back("ARCHITECTURE.md: " + mistake);
    check_rows();
    check_targets();
    for (const char* folder : {"lockstep", "cli"})
      for (const fs::path& file : files_under(root_, folder))
        if (is_source(file)) check_source(file);
    for (const char* folder : {"lockstep", "cli", "tests", "bench"})
      for (const fs::path& file : files_under(root_, folder)) check_name(file);
    return std::move(found_);
  }

 private:
  void check_rows() {
    for (const Part& part : table_.parts)
      for (const std::string& path : part.paths) {
        const bool of_cli = path == "cli" || path.starts_with("cli/");
        const fs::path place = of_cli ? root_ / path : root_ / "lockstep" / path;
        if (!is_folder(place.string()))
          found_.push_back("ARCHITECTURE.md: the table has a row for " + path +
                           ", which is no folder of lockstep/");
      }
    for (const auto& entry : fs::directory_iterator(root_ / "lockstep")) {
      const std::string name = entry.path().filename().string();
      // A folder that only holds other parts needs no row.
      const bool holds_parts =
          std::any_of(table_.parts.begin(), table_.parts.end(), [&](const Part& part) {
            return part.name.starts_with(name + "/") &&
                   fs::is_directory(root_ / "lockstep" / part.name);
          });
      if (entry.is_directory() && !holds_parts && table_.named(name) == nullptr)
        found_.push_back("lockstep/" + name + ": this folder has no row in ARCHITECTURE.md");
    }
  }

  // The build has the parts of the table, with the arrows of the table.
  void check_targets() {
    const std::vector<Target> targets = read_targets(root_);
    for (const Part& part : table_.parts) {
      if (part.name == "cli" || part.name.starts_with("cli/")) continue;
      const auto count = std::ranges::count(targets, target_of(part), &Target::name);
      if (count != 1)
        found_.push_back("ARCHITECTURE.md: the row of " + part.name + " stands for the target " +
                         target_of(part) + ", which " + std::to_string(count) +
                         " calls of lockstep_part() make");
    }
    for (const Target& target : targets) {
      if (target.name == kWholeTarget) continue;
      const std::string where = target.file.generic_string() + ": the target " + target.name;
      const auto part = std::ranges::find(table_.parts, target.name, target_of);
      if (part == table_.parts.end()) {
        found_.push_back(where + " has no row in ARCHITECTURE.md");
        continue;
      }
      if (part->libtorch != target.libtorch)
        found_.push_back(where + (target.libtorch ? " has LibTorch, and its row says no"
                                                  : " has no LibTorch, and its row says yes"));
      for (const std::string& used : target.uses)
        if (std::ranges::none_of(part->may_include, [&](const std::string& name) {
              const Part* const other = table_.named(name);
              return other != nullptr && target_of(*other) == used;
            }))
          found_.push_back(where + " uses " + used + ", which its row may not include");
    }
  }

  // Whether such a folder exists; "*" stands for any folder.
  static bool is_folder(const std::string& place) {
    const auto star = place.find('*');
    if (star == std::string::npos) return fs::is_directory(place);
    const fs::directory_iterator folders(place.substr(0, star)), end;
    return std::any_of(folders, end, [&](const fs::directory_entry& one) {
      return fs::is_directory(one.path().string() + place.substr(star + 1));
    });
  }

  void check_source(const fs::path& file) {
    if (file == kUmbrella) return;
    const Part* part = table_.part_of(table_path(file));
    if (part == nullptr) {
      found_.push_back(file.generic_string() + ": no row of ARCHITECTURE.md holds this file");
      return;
    }
    check_namespaces(file);
    std::ifstream stream(root_ / file);
    int number = 0;
    for (std::string line; std::getline(stream, line);) {
      const std::string where = file.generic_string() + ":" + std::to_string(++number) + ": ";
      if (const auto include = parse_include(line)) check_include(where, file, *part, *include);
      if (file.generic_string() != "lockstep/base/environment.cpp" && reads_environment(line))
        found_.push_back(where + "reads an environment variable, which only "
                                 "lockstep/base/environment.cpp may");
    }
  }

  // A folder is a namespace: that of its part, which is the outermost folder.
  void check_namespaces(const fs::path& file) {
    const std::string path = table_path(file);
    const std::string part = short_name(path);
    const std::string own = "lockstep::" + part.substr(0, part.find('/'));
    const auto is_allowed = [&](const std::string& name) {
      if (is_or_in(name, own) || name == kPublicNames) return true;
      return std::ranges::any_of(kOtherNamespaces, [&](const OtherNamespace& other) {
        // In `lockstep` itself, a namespace within is internal, or has the name of its file.
        const std::string other_name = other.name;
        const bool within = other_name == "lockstep"
                                ? name == "lockstep" || is_or_in(name, "lockstep::internal") ||
                                      is_or_in(name, "lockstep::" + file.stem().string())
                                : is_or_in(name, other_name);
        return within && path.starts_with(std::string(other.folder) + "/");
      });
    };
    std::ifstream stream(root_ / file);
    for (const auto& [name, line] : defined_namespaces(stream))
      if (is_or_in(name, "lockstep") && !is_allowed(name))
        found_.push_back(file.generic_string() + ":" + std::to_string(line) +
                         ": defines names in " + name + ", and the namespace of this folder is " +
                         own);
  }

  void check_include(const std::string& where, const fs::path& file, const Part& part,
                     const Include& include) {
    const std::string& header = include.header;
    if (include.quoted && !header.starts_with("lockstep/") && *file.begin() == "lockstep")
      found_.push_back(where + "includes \"" + header + "\": write it as <lockstep/…>");
    if (header.starts_with("lockstep/") || header.starts_with("cli/")) {
      const Part* used = table_.part_of(table_path(header));
      const auto& allowed = part.may_include;
      if (header == kUmbrella)
        found_.push_back(where + "includes " + header + ", which is for programs outside");
      else if (used == nullptr)
        found_.push_back(where + "includes " + header + ", which no row of ARCHITECTURE.md holds");
      else if (used != &part &&
               std::find(allowed.begin(), allowed.end(), used->name) == allowed.end())
        found_.push_back(where + part.name + " may not include " + used->name + " (" + header +
                         ")");
    }
    for (const char* folder : kLibTorchFolders)
      if (!part.libtorch && header.starts_with(folder))
        found_.push_back(where + part.name + " has no LibTorch, but includes " + header);
  }

  // These names say nothing about the contents.
  void check_name(const fs::path& file) {
    for (const fs::path& piece : file) {
      std::istringstream words(piece.stem().string());
      for (std::string word; std::getline(words, word, '_');)
        if (std::find(kNamelessNames.begin(), kNamelessNames.end(), word) != kNamelessNames.end())
          found_.push_back(file.generic_string() + ": the name '" + word +
                           "' does not say what is inside");
    }
  }

  fs::path root_;
  Table table_;
  std::vector<std::string> found_;
};

}  // namespace

std::vector<std::string> violations(const fs::path& root) { return Checker(root).run(); }

}  // namespace lockstep::architecture
