#include <cli/checkpoint_report.h>

#include <algorithm>
#include <map>
#include <set>

#include <spdlog/fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/base/text.h>
#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/checkpoint/safetensors/strict_json.h>
#include <lockstep/plan/text.h>

namespace lockstep::cli {

namespace {

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

// What can be seen without reading all of it; empty where nothing is wrong.
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

}  // namespace

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
  for (const auto& [step, path] : aside)
    text += fmt::format("'{}' was found damaged and set aside\n", path.string());
  return text;
}

std::string checkpoint_list_json(const std::filesystem::path& checkpoints) {
  json all = json::array();
  for (const auto& [step, path] : checkpoint::list_checkpoints(checkpoints)) {
    Manifest manifest;
    const std::string damage = damage_of(path, manifest);
    json one = {{"step", step},
                {"path", path.string()},
                {"bytes", bytes_of(manifest)},
                {"tensors", manifest.tensors.size()},
                {"files", num_writers(manifest)},
                {"damage", damage.empty() ? json(nullptr) : json(damage)}};
    one["loss"] = manifest.state.last_loss ? json(*manifest.state.last_loss) : json(nullptr);
    all.push_back(std::move(one));
  }
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

}  // namespace lockstep::cli
