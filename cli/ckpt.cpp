// `lockstep ckpt`: looks into checkpoints, checks and compares them, and takes them to and from
// Hugging Face's folders.
#include <cstdio>
#include <map>

#include <lockstep/base/error.h>
#include <lockstep/base/nearest.h>
#include <lockstep/checkpoint/compare.h>
#include <lockstep/checkpoint/folder.h>
#include <lockstep/checkpoint/reader.h>
#include <lockstep/models/hugging_face_folder.h>
#include <lockstep/plan/bytes_text.h>

#include <cli/checkpoint_report.h>
#include <cli/flags.h>

namespace lockstep::cli {

namespace {

namespace fs = std::filesystem;
using checkpoint::CheckpointReader;

// Exit codes as diff(1) has them: something was found.
constexpr int kFound = 1;

struct CkptFlags {
  bool json = false;
  bool tensors = false;
  std::string largest_file = "5GB";
};

void write_out(const std::string& text) { std::fwrite(text.data(), 1, text.size(), stdout); }

fs::path checkpoints_in(const fs::path& folder) {
  return fs::is_directory(folder / "checkpoints") ? folder / "checkpoints" : folder;
}

// A checkpoint, or a run, which stands for its newest.
fs::path checkpoint_at(const fs::path& folder) {
  if (!fs::exists(folder))
    throw UsageError("'{}' does not exist: name a checkpoint, or the folder of a run",
                     folder.string());
  if (fs::exists(folder / checkpoint::kManifestFile)) return folder;
  const auto newest = checkpoint::newest_checkpoint(checkpoints_in(folder));
  if (!newest)
    throw UsageError("'{}' is neither a checkpoint nor a run that has some: it has no {}",
                     folder.string(), checkpoint::kManifestFile);
  return newest->path;
}

int list(const std::vector<std::string>& paths, const CkptFlags& flags) {
  const fs::path folder = checkpoints_in(paths[0]);
  if (!fs::is_directory(folder)) throw UsageError("'{}' is no folder", folder.string());
  write_out(flags.json ? checkpoint_list_json(folder) : checkpoint_list(folder));
  return 0;
}

int show(const std::vector<std::string>& paths, const CkptFlags& flags) {
  const CheckpointReader reader(checkpoint_at(paths[0]));
  write_out(flags.json
                ? checkpoint_json(reader)
                : checkpoint_text(reader, flags.tensors ? Tensors::listed : Tensors::counted));
  return 0;
}

int verify(const std::vector<std::string>& paths, const CkptFlags&) {
  std::vector<fs::path> all;
  if (fs::exists(fs::path(paths[0]) / checkpoint::kManifestFile))
    all.emplace_back(paths[0]);
  else
    for (const auto& one : checkpoint::list_checkpoints(checkpoints_in(paths[0])))
      all.push_back(one.path);
  if (all.empty()) checkpoint_at(paths[0]);
  bool damaged = false;
  for (const fs::path& path : all) {
    std::vector<std::string> damages;
    std::uint64_t bytes = 0;
    try {
      CheckpointReader reader(path);
      damages = reader.damages();
      bytes = reader.bytes_read();
    } catch (const checkpoint::DamagedCheckpoint& damage) {
      damages = {damage.what()};
    }
    for (const std::string& damage : damages) write_out(damage + '\n');
    if (damages.empty())
      write_out(fmt::format("'{}' is whole: {} read, every hash as it was written\n", path.string(),
                            plan::bytes_text(static_cast<double>(bytes))));
    damaged = damaged || !damages.empty();
  }
  return damaged ? kFound : 0;
}

std::string difference_text(const checkpoint::TensorDifference& difference,
                            const CheckpointReader& first, const CheckpointReader& second) {
  using Kind = checkpoint::TensorDifference::Kind;
  const std::string& name = difference.name;
  const auto form = [&](const CheckpointReader& reader) {
    const auto& record = *reader.find(name);
    return fmt::format("{} {}", checkpoint::name(record.dtype),
                       mesh::Placement::full(record.shape).text());
  };
  switch (difference.kind) {
    case Kind::only_in_first: return fmt::format("{}: only in the first", name);
    case Kind::only_in_second: return fmt::format("{}: only in the second", name);
    case Kind::another_form:
      return fmt::format("{}: {} in the first, {} in the second", name, form(first), form(second));
    case Kind::other_values: break;
  }
  std::string text =
      fmt::format("{}: {} of {} elements differ", name, difference.differing, difference.elements);
  if (difference.largest) text += fmt::format(", by {:.3g} at most", *difference.largest);
  return text;
}

int diff(const std::vector<std::string>& paths, const CkptFlags&) {
  CheckpointReader first(checkpoint_at(paths[0])), second(checkpoint_at(paths[1]));
  std::size_t differing = 0;
  compare(first, second, [&](const checkpoint::TensorDifference& difference) {
    ++differing;
    write_out(difference_text(difference, first, second) + '\n');
  });
  if (differing == 0)
    write_out(fmt::format("the same {} tensors, to the bit\n", first.manifest().tensors.size()));
  return differing == 0 ? 0 : kFound;
}

int export_model(const std::vector<std::string>& paths, const CkptFlags& flags) {
  CheckpointReader reader(checkpoint_at(paths[0]));
  const auto largest =
      static_cast<std::uint64_t>(plan::parse_bytes(flags.largest_file, "--max-file-size"));
  for (const std::string& file :
       models::export_to_hugging_face(reader, paths[1], {.largest_file = largest}))
    write_out((fs::path(paths[1]) / file).string() + '\n');
  return 0;
}

int import_model(const std::vector<std::string>& paths, const CkptFlags&) {
  write_out(models::import_from_hugging_face(paths[0], paths[1]).string() + '\n');
  return 0;
}

struct Action {
  std::string_view usage;
  std::size_t num_paths;
  int (*run)(const std::vector<std::string>& paths, const CkptFlags& flags);
};

const std::map<std::string, Action, std::less<>> kActions = {
    {"ls", {"RUN", 1, list}},
    {"show", {"CHECKPOINT", 1, show}},
    {"verify", {"CHECKPOINT or RUN", 1, verify}},
    {"diff", {"FIRST SECOND", 2, diff}},
    {"export", {"CHECKPOINT FOLDER", 2, export_model}},
    {"import", {"FOLDER RUN", 2, import_model}},
};

}  // namespace

int ckpt(Arguments arguments) {
  CLI::App app("Looks into checkpoints, checks and compares them, and takes models to and from\n"
               "Hugging Face's folders.",
               "lockstep ckpt");
  show_usage(app, "ACTION [FLAGS] PATH…");
  app.footer(
      "  ls RUN                    the checkpoints of a run, and files that are missing or cut "
      "off\n"
      "  show CHECKPOINT           what one holds\n"
      "  verify CHECKPOINT or RUN  reads everything, and names what is damaged\n"
      "  diff FIRST SECOND         which tensors differ, whatever layout they were saved in\n"
      "  export CHECKPOINT FOLDER  as the transformers library reads it\n"
      "  import FOLDER RUN         the reverse: weights for model.from and 'lockstep sample'\n"
      "export and import want a new folder, and replace nothing.\n"
      "A run in place of a checkpoint stands for its newest. Exits with 1 where verify or\n"
      "diff found something.");
  CkptFlags flags;
  app.add_flag("--json", flags.json, "ls, show: for programs");
  app.add_flag("--tensors", flags.tensors, "show: every tensor, and where its pieces are");
  app.add_option("--max-file-size", flags.largest_file, "export: files of at most so much (5GB)");
  SplitArguments split = split_at_words(app, arguments, 3);
  if (!parse_flags(app, std::move(split.flags))) return 0;
  std::vector<std::string_view> names;
  for (const auto& [name, action] : kActions) names.push_back(name);
  const auto found = split.program.empty() ? kActions.end() : kActions.find(split.program.front());
  if (found == kActions.end())
    throw UsageError("lockstep ckpt wants an action: ls, show, verify, diff, export or import{}",
                     split.program.empty()
                         ? ""
                         : fmt::format("; there is no '{}'{}", split.program.front(),
                                       did_you_mean(split.program.front(), names)));
  const std::vector<std::string> paths(split.program.begin() + 1, split.program.end());
  if (paths.size() != found->second.num_paths)
    throw UsageError("lockstep ckpt {} {}: {} path{} given", found->first, found->second.usage,
                     paths.size(), paths.size() == 1 ? " was" : "s were");
  return found->second.run(paths, flags);
}

}  // namespace lockstep::cli
