// `lockstep ckpt`: looks into checkpoints, checks and compares them, and takes them to and from
// Hugging Face's folders.
#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <spdlog/fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/base/text.h>
#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/checkpoint/safetensors/strict_json.h>
#include <lockstep/models/folders/hugging_face_folder.h>
#include <lockstep/plan/text.h>

#include <cli/flags.h>

namespace lockstep::cli {

namespace {

enum class Tensors { counted, listed };

using checkpoint::Manifest;
using checkpoint::TensorRecord;
using nlohmann::json;

std::uint64_t bytes_of(const TensorRecord& record) {
  return piece_bytes(record.dtype, mesh::Placement::full(record.shape));
}

std::uint64_t bytes_of(const Manifest& manifest) {
  std::uint64_t bytes = 0;
  for (const auto& [name, file] : manifest.files) bytes += file.bytes;
  return bytes;
}

int num_writers(const Manifest& manifest) {
  std::set<std::string> files;
  for (const auto& [name, tensor] : manifest.tensors)
    for (const checkpoint::Piece& piece : tensor.pieces) files.insert(piece.file);
  return static_cast<int>(files.size());
}

struct Sum {
  std::size_t tensors = 0;
  std::int64_t elements = 0;
  std::uint64_t bytes = 0;
};

// By the first word of names: model, optimizer, generators.
std::map<std::string, Sum> sums_of(const Manifest& manifest) {
  std::map<std::string, Sum> sums;
  for (const auto& [name, tensor] : manifest.tensors) {
    Sum& sum = sums[name.substr(0, name.find('/'))];
    ++sum.tensors;
    sum.elements += mesh::Placement::full(tensor.shape).elements();
    sum.bytes += bytes_of(tensor);
  }
  return sums;
}

std::string loss_text(const checkpoint::TrainingState& state) {
  return state.last_loss ? fmt::format("{:.4f}", *state.last_loss) : "-";
}

constexpr const char* kConfig = "config.json";
constexpr int kConfigDepth = 16;

// Each value that is not made of others, by its path: "rope_scaling.factor". Nothing where the
// checkpoint is of a program of the user's own, and has no such file.
std::map<std::string, json> config_values(checkpoint::CheckpointReader& reader) {
  std::map<std::string, json> values;
  if (!reader.manifest().files.contains(kConfig)) return values;
  const json config = checkpoint::parse_strictly(reader.read_text_file(kConfig),
                                                 (reader.path() / kConfig).string(), kConfigDepth);
  const json flat = config.flatten();
  for (const auto& [pointer, value] : flat.items()) {
    std::string path = pointer.empty() ? pointer : pointer.substr(1);
    std::ranges::replace(path, '/', '.');
    values[path] = value;
  }
  return values;
}

// The damage that shows without reading all of the checkpoint; empty where there is none.
std::string damage_of(const std::filesystem::path& path, Manifest& manifest) {
  try {
    checkpoint::CheckpointReader reader(path);
    manifest = reader.manifest();
    reader.check_files();
    return "";
  } catch (const UsageError& error) {
    return error.what();
  }
}

// A run that was resumed has found this checkpoint damaged, and gone on from an older one.
constexpr std::string_view kSetAside = "was found damaged when a run was resumed, and set aside";

// A run's checkpoints, a line each; damaged ones say so.
std::string checkpoint_list(const std::filesystem::path& checkpoints) {
  const auto all = checkpoint::list_checkpoints(checkpoints);
  const auto aside = checkpoint::list_set_aside(checkpoints);
  if (all.empty() && aside.empty())
    return fmt::format("'{}' has no checkpoints yet\n", checkpoints.string());
  std::string text = fmt::format("{:>10} {:>10} {:>12} {:>8} {:>8}  {}\n", "step", "loss", "size",
                                 "tensors", "files", "folder");
  std::vector<std::string> damages;
  for (const auto& [step, path] : all) {
    Manifest manifest;
    const std::string damage = damage_of(path, manifest);
    text += fmt::format("{:>10} {:>10} {:>12} {:>8} {:>8}  {}{}\n", step, loss_text(manifest.state),
                        plan::bytes_text(static_cast<double>(bytes_of(manifest))),
                        manifest.tensors.size(), num_writers(manifest), path.string(),
                        damage.empty() ? "" : "  DAMAGED");
    if (!damage.empty()) damages.push_back(damage);
  }
  for (const std::string& damage : damages) text += damage + '\n';
  for (const auto& [step, path] : aside) {
    Manifest manifest;
    const std::string damage = damage_of(path, manifest);
    text += fmt::format("'{}' {}{}\n", path.string(), kSetAside,
                        damage.empty() ? "; 'lockstep ckpt verify' reads it again" : ": " + damage);
  }
  return text;
}

std::string checkpoint_list_json(const std::filesystem::path& checkpoints) {
  json all = json::array();
  const auto add = [&](const checkpoint::Checkpoint& listed, bool set_aside) {
    Manifest manifest;
    std::string damage = damage_of(listed.path, manifest);
    if (set_aside && damage.empty()) damage = kSetAside;
    json one = {{"step", listed.step},
                {"path", listed.path.string()},
                {"bytes", bytes_of(manifest)},
                {"tensors", manifest.tensors.size()},
                {"files", num_writers(manifest)},
                {"set_aside", set_aside},
                {"damage", damage.empty() ? json(nullptr) : json(damage)}};
    one["loss"] = manifest.state.last_loss ? json(*manifest.state.last_loss) : json(nullptr);
    all.push_back(std::move(one));
  };
  for (const auto& one : checkpoint::list_checkpoints(checkpoints)) add(one, false);
  for (const auto& one : checkpoint::list_set_aside(checkpoints)) add(one, true);
  return all.dump(1) + '\n';
}

std::string checkpoint_text(const checkpoint::CheckpointReader& reader, Tensors tensors) {
  const Manifest& manifest = reader.manifest();
  const checkpoint::TrainingState& state = manifest.state;
  std::string text = fmt::format(
      "{}\nstep {}, loss {}, {} samples seen; epoch {}, {} of {} samples; seed {}\n{} in {} files, "
      "tensors in {} of them\n",
      reader.path().string(), state.step, loss_text(state), state.samples_seen, state.data.epoch,
      state.data.position, state.data.size, state.seed,
      plan::bytes_text(static_cast<double>(bytes_of(manifest))), manifest.files.size() + 1,
      num_writers(manifest));
  for (const auto& [name, sum] : sums_of(manifest))
    text += fmt::format("{:>12}: {} tensors, {} elements, {}\n", name, sum.tensors,
                        count_text(static_cast<double>(sum.elements)),
                        plan::bytes_text(static_cast<double>(sum.bytes)));
  if (tensors == Tensors::counted) return text;
  for (const auto& [name, tensor] : manifest.tensors) {
    text += fmt::format("{} {} {}", name, checkpoint::name(tensor.dtype),
                        checkpoint::shape_text(tensor.shape));
    if (tensor.pieces.size() == 1) {
      text += fmt::format(" in {}\n", tensor.pieces.front().file);
      continue;
    }
    text += fmt::format(" in {} pieces\n", tensor.pieces.size());
    for (const checkpoint::Piece& piece : tensor.pieces)
      text += fmt::format("    {} in {}\n", piece.placement.text(), piece.file);
  }
  return text;
}

std::string checkpoint_json(const checkpoint::CheckpointReader& reader) {
  const Manifest& manifest = reader.manifest();
  json root = {{"path", reader.path().string()},
               {"state", json::parse(to_text(manifest.state))},
               {"bytes", bytes_of(manifest)}};
  for (const auto& [name, tensor] : manifest.tensors) {
    json pieces = json::array();
    for (const checkpoint::Piece& piece : tensor.pieces)
      pieces.push_back({{"file", piece.file}, {"holds", piece.placement.text()}});
    root["tensors"][name] = {{"dtype", checkpoint::name(tensor.dtype)},
                             {"shape", tensor.shape},
                             {"bytes", bytes_of(tensor)},
                             {"pieces", std::move(pieces)}};
  }
  return root.dump(1) + '\n';
}

// A sentence for each key in which the two differ as config.json describes their models.
std::vector<std::string> config_differences(checkpoint::CheckpointReader& first,
                                            checkpoint::CheckpointReader& second) {
  const auto before = config_values(first), after = config_values(second);
  std::vector<std::string> found;
  const auto in_one = [&](const std::string& key, const json& value, std::string_view where) {
    found.push_back(fmt::format("{}: {} is {} in the {} only", kConfig, key, value.dump(), where));
  };
  for (const auto& [key, value] : before) {
    const auto other = after.find(key);
    if (other == after.end())
      in_one(key, value, "first");
    else if (other->second != value)
      found.push_back(fmt::format("{}: {} is {} in the first, {} in the second", kConfig, key,
                                  value.dump(), other->second.dump()));
  }
  for (const auto& [key, value] : after)
    if (!before.contains(key)) in_one(key, value, "second");
  return found;
}

namespace fs = std::filesystem;
using checkpoint::CheckpointReader;

// Exit codes as diff(1) has them: something was found.
constexpr int kFound = 1;

struct CkptFlags {
  bool json = false;
  bool tensors = false;
  std::string largest_file = "5GB";
};

// Throws where it cannot.
void write_out(const std::string& text) { fmt::print("{}", text); }

fs::path checkpoints_in(const fs::path& folder) {
  return fs::is_directory(folder / "checkpoints") ? folder / "checkpoints" : folder;
}

// A checkpoint, or a run, which stands for its newest.
fs::path checkpoint_at(const fs::path& folder) {
  if (!fs::exists(folder))
    throw UsageError("'{}' does not exist: name a checkpoint, or the folder of a run",
                     folder.string());
  if (checkpoint::is_checkpoint(folder)) return folder;
  const auto newest = checkpoint::newest_checkpoint(checkpoints_in(folder));
  if (!newest)
    throw UsageError("'{}' is neither a checkpoint nor a run that has some: it has no {}",
                     folder.string(), checkpoint::kManifestFile);
  return newest->path;
}

int list(const std::vector<std::string>& paths, const CkptFlags& flags) {
  const fs::path folder = checkpoints_in(paths[0]);
  if (!fs::is_directory(folder)) throw UsageError("'{}' is no folder", folder.string());
  if (checkpoint::is_checkpoint(folder))
    throw UsageError("'{}' is a checkpoint itself: name the folder of its run, or look into it "
                     "with 'lockstep ckpt show'",
                     folder.string());
  // A run has a folder for them before it has the first.
  if (folder == paths[0] && checkpoint::list_checkpoints(folder).empty() &&
      checkpoint::list_set_aside(folder).empty())
    throw UsageError("'{}' is not the folder of a run: it has neither a folder 'checkpoints' nor a "
                     "checkpoint",
                     folder.string());
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

// Reads all of a checkpoint, and says what is damaged. Returns whether it is whole.
bool verify(const fs::path& path) {
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
  return damages.empty();
}

int verify(const std::vector<std::string>& paths, const CkptFlags&) {
  if (checkpoint::is_checkpoint(paths[0])) return verify(fs::path(paths[0])) ? 0 : kFound;
  const auto all = checkpoint::list_checkpoints(checkpoints_in(paths[0]));
  const auto aside = checkpoint::list_set_aside(checkpoints_in(paths[0]));
  if (all.empty() && aside.empty()) checkpoint_at(paths[0]);
  bool whole = true;
  for (const checkpoint::Checkpoint& one : all) whole = verify(one.path) && whole;
  for (const checkpoint::Checkpoint& one : aside) {
    const bool is_whole = verify(one.path);
    write_out(fmt::format("'{}' {}: {}\n", one.path.string(), kSetAside,
                          is_whole ? fmt::format("rename it to {} to use it again",
                                                 checkpoint::checkpoint_name(one.step))
                                   : "no run uses it any more, and you may remove it"));
    whole = is_whole && whole;
  }
  return whole ? 0 : kFound;
}

// Describes how a tensor that both checkpoints have differs.
std::string difference_text(const checkpoint::TensorDifference& difference,
                            const CheckpointReader& first, const CheckpointReader& second) {
  using Kind = checkpoint::TensorDifference::Kind;
  const std::string& name = difference.name;
  const auto form = [&](const CheckpointReader& reader) {
    const auto& record = *reader.find(name);
    return fmt::format("{} {}", checkpoint::name(record.dtype),
                       mesh::Placement::full(record.shape).text());
  };
  if (difference.kind == Kind::another_form)
    return fmt::format("{}: {} in the first, {} in the second", name, form(first), form(second));
  std::string text =
      fmt::format("{}: {} of {} elements differ", name, difference.differing, difference.elements);
  if (difference.largest) text += fmt::format(", by {:.3g} at most", *difference.largest);
  return text;
}

// The result of the comparison for one kind of tensors: model, optimizer, generators.
struct KindOfTensors {
  std::size_t in_both = 0;
  std::size_t differing = 0;
  std::vector<std::string> only_in_first, only_in_second;
};

// All of a kind are counted, some are named.
std::string only_text(const std::string& kind, const std::vector<std::string>& names,
                      std::string_view where, bool all) {
  constexpr std::size_t kMostNamed = 5;
  if (names.empty()) return "";
  std::string text = fmt::format("{}: {} tensor{} only in the {}", kind, names.size(),
                                 names.size() == 1 ? "" : "s", where);
  if (all) return text + '\n';
  const std::size_t named = std::min(names.size(), kMostNamed);
  return fmt::format(
      "{}: {}{}\n", text,
      fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(named), ", "),
      named < names.size() ? ", …" : "");
}

std::string summary_text(const std::string& kind, const KindOfTensors& found) {
  const auto& [in_both, differing, only_in_first, only_in_second] = found;
  std::string text;
  if (differing > 0)
    text += fmt::format("{}: {} of {} tensors differ\n", kind, differing, in_both);
  else if (in_both > 0)
    text += fmt::format("{}: the same {} tensors{}, to the bit\n", kind, in_both,
                        only_in_first.empty() && only_in_second.empty() ? "" : " in both");
  return text + only_text(kind, only_in_first, "first", in_both == 0) +
         only_text(kind, only_in_second, "second", in_both == 0);
}

// Prints a line for each key of the models' configs and each tensor that differ, and one line for
// each kind of tensors that only one checkpoint has: an imported model has no optimizer.
int diff(const std::vector<std::string>& paths, const CkptFlags&) {
  using Kind = checkpoint::TensorDifference::Kind;
  CheckpointReader first(checkpoint_at(paths[0])), second(checkpoint_at(paths[1]));
  std::map<std::string, KindOfTensors> kinds;
  const auto kind_of = [&](const std::string& name) -> KindOfTensors& {
    return kinds[name.substr(0, name.find('/'))];
  };
  bool differ = false;
  for (const std::string& difference : config_differences(first, second)) {
    differ = true;
    write_out(difference + '\n');
  }
  for (const auto& [name, record] : first.manifest().tensors)
    if (second.find(name) != nullptr) ++kind_of(name).in_both;
  compare(first, second, [&](const checkpoint::TensorDifference& difference) {
    differ = true;
    KindOfTensors& kind = kind_of(difference.name);
    if (difference.kind == Kind::only_in_first)
      kind.only_in_first.push_back(difference.name);
    else if (difference.kind == Kind::only_in_second)
      kind.only_in_second.push_back(difference.name);
    else {
      ++kind.differing;
      write_out(difference_text(difference, first, second) + '\n');
    }
  });
  for (const auto& [kind, found] : kinds) write_out(summary_text(kind, found));
  return differ ? kFound : 0;
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
      "  diff FIRST SECOND         which tensors differ, whatever layout they were saved in, and\n"
      "                            which keys of config.json\n"
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
