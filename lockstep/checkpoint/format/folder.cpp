#include <lockstep/checkpoint/format/folder.h>

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <map>
#include <random>
#include <string_view>
#include <system_error>
#include <utility>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/file.h>
#include <lockstep/base/log.h>
#include <lockstep/checkpoint/format/piece_file.h>

namespace lockstep::checkpoint {

namespace {

namespace fs = std::filesystem;

// The meaning of a name in a run's folder. Only names that checkpoint_name() can have made are
// ours.
struct FolderName {
  enum class Kind {
    complete,  // step-00000500
    aside,     // damaged-step-00000500, damaged-step-00000500-2
    part,      // being written
    old,       // complete, and about to be replaced
    gone,      // being removed
  };
  Kind kind = Kind::complete;
  std::int64_t step = 0;
};

constexpr std::string_view kStep = "step-";
constexpr std::string_view kAside = "damaged-";

constexpr std::pair<FolderName::Kind, std::string_view> kHidden[] = {
    {FolderName::Kind::part, ".part-"},
    {FolderName::Kind::old, ".old-"},
    {FolderName::Kind::gone, ".gone-"},
};

std::optional<std::int64_t> parse_step(std::string_view name) {
  if (!name.starts_with(kStep)) return std::nullopt;
  std::int64_t step = 0;
  const auto [end, error] =
      std::from_chars(name.data() + kStep.size(), name.data() + name.size(), step);
  if (error != std::errc() || step < 0 || checkpoint_name(step) != name) return std::nullopt;
  return step;
}

std::optional<FolderName> parse_name(std::string_view name) {
  if (const auto step = parse_step(name)) return FolderName{FolderName::Kind::complete, *step};
  if (name.starts_with(kAside)) {
    name.remove_prefix(kAside.size());
    const auto step = parse_step(name.substr(0, name.find('-', kStep.size())));
    return step ? std::optional(FolderName{FolderName::Kind::aside, *step}) : std::nullopt;
  }
  if (!name.starts_with('.')) return std::nullopt;
  name.remove_prefix(1);
  for (const auto& [kind, mark] : kHidden)
    if (const auto at = name.find(mark); at != std::string_view::npos)
      if (const auto step = parse_step(name.substr(0, at))) return FolderName{kind, *step};
  return std::nullopt;
}

// Processes of two hosts may have the same number, and the one that was taken for lost must not
// find its files in the other's folder.
std::string writer_name() {
  static const std::uint32_t chance = std::random_device()();
  return fmt::format("{}-{:08x}", ::getpid(), chance);
}

std::string hidden_name(FolderName::Kind kind, std::int64_t step) {
  const auto* const mark = std::find_if(std::begin(kHidden), std::end(kHidden),
                                        [&](const auto& known) { return known.first == kind; });
  return fmt::format(".{}{}{}", checkpoint_name(step), mark->second, writer_name());
}

void rename_or_throw(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0)
    throw FileError("cannot rename '{}' to '{}': {}", from.string(), to.string(),
                    std::strerror(errno));
}

void remove_or_throw(const fs::path& folder) {
  std::error_code error;
  fs::remove_all(folder, error);
  if (error) throw FileError("cannot remove '{}': {}", folder.string(), error.message());
}

// Renamed first: a checkpoint that has lost some of its files must not look like one.
void discard(const fs::path& folder, std::int64_t step) {
  const fs::path gone = folder.parent_path() / hidden_name(FolderName::Kind::gone, step);
  remove_or_throw(gone);
  rename_or_throw(folder, gone);
  remove_or_throw(gone);
}

struct Found {
  FolderName name;
  fs::path path;
};

// Entries of the folder with a name of ours, in no order.
std::vector<Found> scan(const fs::path& run_folder) {
  std::vector<Found> found;
  std::error_code error;
  for (auto it = fs::directory_iterator(run_folder, error);
       !error && it != fs::directory_iterator(); it.increment(error))
    if (const auto name = parse_name(it->path().filename().string()))
      found.push_back({*name, it->path()});
  if (error && error != std::errc::no_such_file_or_directory)
    throw UsageError("cannot read the folder of checkpoints '{}': {}", run_folder.string(),
                     error.message());
  return found;
}

void remove_leftover(const fs::path& run_folder, const FolderName& name, const fs::path& path) {
  const fs::path final_path = run_folder / checkpoint_name(name.step);
  if (name.kind == FolderName::Kind::old && !is_there(final_path)) {
    log::info("'{}' is back: its replacement was not completed", final_path.string());
    rename_or_throw(path, final_path);
  } else if (name.kind == FolderName::Kind::old) {
    discard(path, name.step);
  } else {
    log::info("removing '{}', which a writer that was ended left behind", path.string());
    remove_or_throw(path);
  }
}

// A leftover that cannot be removed takes room on the disk, which is no reason to lose a
// checkpoint.
void remove_leftovers(const fs::path& run_folder) {
  for (const auto& [name, path] : scan(run_folder)) {
    if (name.kind == FolderName::Kind::complete || name.kind == FolderName::Kind::aside) continue;
    try {
      remove_leftover(run_folder, name, path);
    } catch (const FileError& error) {
      log::warn("a part of a checkpoint that is not needed any more stays: {}", error.what());
    }
  }
}

// A model in Hugging Face's form may lie in a folder that has the name of a checkpoint of ours.
bool is_exported(const fs::path& folder) {
  return !is_there(folder / kManifestFile) && (is_there(folder / "model.safetensors") ||
                                               is_there(folder / "model.safetensors.index.json"));
}

}  // namespace

std::string checkpoint_name(std::int64_t step) { return fmt::format("{}{:08}", kStep, step); }

bool is_checkpoint(const fs::path& folder) {
  if (is_there(folder / kManifestFile)) return true;
  if (std::error_code ignored; !fs::is_directory(folder, ignored)) return false;
  if (is_exported(folder)) return false;
  const auto name = parse_name((folder / "").parent_path().filename().string());
  // The leftovers of a killed writer were never complete.
  if (name) return name->kind != FolderName::Kind::part && name->kind != FolderName::Kind::gone;
  return is_there(folder / piece_file_name(0));
}

std::vector<Checkpoint> list_checkpoints(const fs::path& run_folder) {
  std::map<std::int64_t, fs::path> complete;
  std::error_code ignored;
  for (auto& [name, path] : scan(run_folder)) {
    const bool candidate =
        name.kind == FolderName::Kind::complete || name.kind == FolderName::Kind::old;
    if (!candidate || !fs::is_directory(path, ignored) || is_exported(path)) continue;
    // One that was about to be replaced counts where its successor did not get the name.
    if (name.kind == FolderName::Kind::complete)
      complete[name.step] = std::move(path);
    else
      complete.emplace(name.step, std::move(path));
  }
  std::vector<Checkpoint> result;
  result.reserve(complete.size());
  for (auto& [step, path] : complete) result.push_back({step, std::move(path)});
  return result;
}

std::optional<Checkpoint> newest_checkpoint(const fs::path& run_folder) {
  auto all = list_checkpoints(run_folder);
  if (all.empty()) return std::nullopt;
  return std::move(all.back());
}

fs::path set_aside(const Checkpoint& checkpoint) {
  const fs::path folder = checkpoint.path.parent_path();
  const std::string name = std::string(kAside) + checkpoint_name(checkpoint.step);
  fs::path aside = folder / name;
  for (int number = 2; is_there(aside); ++number)
    aside = folder / fmt::format("{}-{}", name, number);
  rename_or_throw(checkpoint.path, aside);
  sync_folder(folder);
  return aside;
}

std::vector<Checkpoint> list_set_aside(const fs::path& run_folder) {
  std::vector<Checkpoint> result;
  for (auto& [name, path] : scan(run_folder))
    if (name.kind == FolderName::Kind::aside) result.push_back({name.step, std::move(path)});
  std::ranges::sort(result, {},
                    [](const Checkpoint& one) { return std::pair(one.step, one.path); });
  return result;
}

std::vector<Checkpoint> remove_old(const fs::path& run_folder, int keep_last) {
  if (keep_last < 0)
    throw UsageError("{} checkpoints cannot be kept: 0 keeps all, 1 the newest", keep_last);
  std::vector<Checkpoint> removed = list_checkpoints(run_folder);
  // One that nothing can be read from takes no other's place.
  std::erase_if(removed, [](const Checkpoint& one) { return !is_there(one.path / kManifestFile); });
  const auto keep = static_cast<std::size_t>(keep_last);
  if (keep == 0 || removed.size() <= keep) return {};
  removed.resize(removed.size() - keep);
  for (const Checkpoint& checkpoint : removed) discard(checkpoint.path, checkpoint.step);
  sync_folder(run_folder);
  return removed;
}

CheckpointWriter::CheckpointWriter(fs::path run_folder, std::int64_t step,
                                   std::shared_ptr<const FolderLock> lock)
    : run_folder_(std::move(run_folder)), step_(step), lock_(std::move(lock)) {
  if (step < 0) throw UsageError("a checkpoint of step {}: steps are counted from 0", step);
  std::error_code error;
  if (fs::create_directories(run_folder_, error))
    sync_folder(fs::absolute(run_folder_).lexically_normal().parent_path());
  if (error)
    throw FileError("cannot make the folder of checkpoints '{}': {}", run_folder_.string(),
                    error.message());
  if (lock_ == nullptr) lock_ = std::make_shared<const FolderLock>(run_folder_);
  lock_->check();
  remove_leftovers(run_folder_);
  const fs::path part = run_folder_ / hidden_name(FolderName::Kind::part, step_);
  // One that is there has files in it that could not be removed.
  if (!fs::create_directory(part, error))
    throw FileError("cannot make '{}': {}", part.string(),
                    error ? error.message() : "it is there already");
  part_ = part;
}

CheckpointWriter::~CheckpointWriter() {
  std::error_code ignored;
  if (!part_.empty()) fs::remove_all(part_, ignored);
}

fs::path CheckpointWriter::commit() {
  LOCKSTEP_CHECK(!part_.empty(), "a checkpoint is committed once");
  if (!is_there(part_ / kManifestFile))
    throw UsageError("the checkpoint in '{}' has no {}, without which it is not complete",
                     part_.string(), kManifestFile);
  sync_folder(part_);
  lock_->check();
  fs::path final_path = run_folder_ / checkpoint_name(step_);
  const fs::path old = run_folder_ / hidden_name(FolderName::Kind::old, step_);
  const bool replaces = is_there(final_path);
  if (replaces) rename_or_throw(final_path, old);
  try {
    rename_or_throw(part_, final_path);
  } catch (...) {
    if (replaces) rename_or_throw(old, final_path);
    throw;
  }
  part_.clear();
  sync_folder(run_folder_);
  if (replaces) discard(old, step_);
  return final_path;
}

}  // namespace lockstep::checkpoint
