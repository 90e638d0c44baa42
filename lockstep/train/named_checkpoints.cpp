#include <lockstep/train/named_checkpoints.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/file.h>
#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/train/main_rank.h>

namespace lockstep::train {

namespace fs = std::filesystem;

namespace {

constexpr const char* kLatestFile = "latest";

void check_tag(const std::string& tag) {
  const bool names_a_folder =
      std::ranges::none_of(tag, [](unsigned char c) { return c == '/' || c < ' ' || c == 0x7f; });
  if (!names_a_folder || tag.starts_with('.') || tag == kLatestFile || tag.starts_with("step-") ||
      tag.starts_with("damaged-"))
    throw UsageError("\"{}\" cannot be a checkpoint's tag: it must be the name of a folder, and "
                     "none that checkpoints without a tag have",
                     tag);
}

// Such as "\"bad\", \"good\"".
std::string tags_in(const fs::path& folder) {
  std::vector<std::string> tags;
  std::error_code unreadable;
  for (const auto& entry : fs::directory_iterator(folder, unreadable))
    if (entry.is_directory() && checkpoint::newest_checkpoint(entry.path()))
      tags.push_back(fmt::format("\"{}\"", entry.path().filename().string()));
  std::ranges::sort(tags);
  return fmt::format("{}", fmt::join(tags, ", "));
}

// The checkpoint that was saved last in a folder; empty where it has none.
fs::path last_saved(const fs::path& folder) {
  if (!is_there(folder / kLatestFile)) {
    const auto newest = checkpoint::newest_checkpoint(folder);
    const std::string tags = tags_in(folder);
    if (newest || !tags.empty())
      throw UsageError("'{}' has checkpoints ({}), and its file '{}', which names the one that was "
                       "saved last, is gone: name a tag, or write the file anew",
                       folder.string(), newest ? newest->path.filename().string() : tags,
                       kLatestFile);
    return {};
  }
  const MappedFile file(folder / kLatestFile);
  std::string name(reinterpret_cast<const char*>(file.bytes().data()), file.size());
  while (!name.empty() && name.back() == '\n') name.pop_back();
  if (name.starts_with("step-") && name.find('/') == name.npos) return folder / name;
  check_tag(name);
  return last_saved(folder / name);
}

// Removes the oldest checkpoints until `keep` are left, but never `saved`: a run that went back has
// checkpoints of later steps.
void remove_older(const fs::path& folder, const std::string& saved, std::size_t keep) {
  std::vector<checkpoint::Checkpoint> others = checkpoint::list_checkpoints(folder);
  std::erase_if(others, [&](const auto& one) { return one.path.filename() == saved; });
  for (std::size_t i = 0; i + keep < others.size() + 1; ++i) fs::remove_all(others[i].path);
}

}  // namespace

// Makes what was saved the last in its folder, on the main rank, once it is complete.
struct NamedCheckpoints::Naming {
  fs::path folder;
  std::string tag;
  int keep = 0;
  std::string error = {};

  fs::path place() const { return tag.empty() ? folder : folder / tag; }

  void complete(std::int64_t step) {
    try {
      const std::string name = checkpoint::checkpoint_name(step);
      write_durably(place() / kLatestFile, name + "\n");
      if (!tag.empty()) write_durably(folder / kLatestFile, tag + "\n");
      const auto stay = static_cast<std::size_t>(tag.empty() ? keep : 1);
      if (stay > 0) remove_older(place(), name, stay);
    } catch (const std::exception& failed) {
      error = failed.what();
    }
  }
};

fs::path NamedCheckpoints::save(const fs::path& folder, const std::string& tag,
                                const CheckpointContents& contents,
                                const NamedSaveOptions& options) {
  finish();
  check_tag(tag);
  naming_ = std::make_shared<Naming>(Naming{.folder = folder, .tag = tag, .keep = options.keep});
  under_way_ = std::make_unique<Checkpointer>(
      dist_, naming_->place(),
      CheckpointerOptions{.lock = options.lock, .committed = [naming = naming_](std::int64_t step) {
                            naming->complete(step);
                          }});
  if (options.asynchronous) {
    under_way_->save(contents);
    return naming_->place() / checkpoint::checkpoint_name(contents.state.step);
  }
  const SaveResult saved = under_way_->save_and_wait(contents);
  heed(saved);
  return saved.path;
}

void NamedCheckpoints::poll() {
  if (under_way_ == nullptr) return;
  if (const auto saved = under_way_->poll()) heed(*saved);
}

void NamedCheckpoints::finish() {
  if (under_way_ != nullptr) heed(under_way_->finish());
}

void NamedCheckpoints::heed(const SaveResult& saved) {
  under_way_.reset();
  if (!saved.ok())
    throw UsageError("the checkpoint of step {} could not be written: {}", saved.step, saved.error);
  asked_of_main_rank(dist_, [&]() -> std::string {
    if (!naming_->error.empty())
      throw UsageError("the checkpoint '{}' is complete, but is not named as the last: {}",
                       saved.path.string(), naming_->error);
    return "";
  });
}

fs::path NamedCheckpoints::find(const fs::path& folder, const std::string& tag) const {
  check_tag(tag);
  return asked_of_main_rank(dist_, [&]() -> std::string {
    if (tag.empty() && checkpoint::is_checkpoint(folder)) return folder.string();
    if (!tag.empty() && !is_there(folder / tag)) {
      const std::string tags = tags_in(folder);
      throw UsageError("'{}' has no checkpoint with the tag \"{}\": it has {}", folder.string(),
                       tag, tags.empty() ? "none with a tag" : tags);
    }
    return last_saved(tag.empty() ? folder : folder / tag).string();
  });
}

checkpoint::TrainingState read_state(const DistributedManager& dist, const fs::path& from) {
  return checkpoint::parse_state(
      asked_of_main_rank(dist,
                         [&] {
                           checkpoint::CheckpointReader reader(from);
                           return checkpoint::to_text(reader.manifest().state);
                         }),
      "the checkpoint's state");
}

std::string read_file(const DistributedManager& dist, const fs::path& from, const std::string& name,
                      const std::string& otherwise) {
  return asked_of_main_rank(dist, [&] {
    checkpoint::CheckpointReader reader(from);
    return reader.manifest().files.contains(name) ? reader.read_text_file(name) : otherwise;
  });
}

}  // namespace lockstep::train
