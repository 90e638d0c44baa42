#include <lockstep/models/folders/hugging_face_folder.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include <nlohmann/json.hpp>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/error.h>
#include <lockstep/base/file.h>
#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/piece_file.h>
#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/checkpoint/safetensors/folder.h>
#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/checkpoint/safetensors/writer.h>
#include <lockstep/models/spec/family.h>
#include <lockstep/models/spec/hugging_face.h>

namespace lockstep::models {

namespace {

namespace fs = std::filesystem;
using checkpoint::TensorDeclaration;
using checkpoint::TensorRecord;

constexpr const char* kConfig = "config.json";
constexpr std::string_view kModel = "model/";

// [rows, columns] to [columns, rows].
std::vector<std::byte> transposed(std::span<const std::byte> bytes, std::int64_t rows,
                                  std::int64_t columns, std::size_t size) {
  std::vector<std::byte> result(bytes.size());
  for (std::int64_t row = 0; row < rows; ++row)
    for (std::int64_t column = 0; column < columns; ++column)
      std::memcpy(result.data() + static_cast<std::size_t>(column * rows + row) * size,
                  bytes.data() + static_cast<std::size_t>(row * columns + column) * size, size);
  return result;
}

// A tensor as a folder has it.
struct FoundTensor {
  std::string name;
  std::string parameter;  // of ours
  checkpoint::DType dtype = checkpoint::DType::f32;
  std::vector<std::int64_t> shape;
  bool transposed = false;  // whether ours is the transpose
};

void check_tensors(const fs::path& folder, const ModelConfig& config,
                   const std::vector<FoundTensor>& found) {
  checkpoint::Mismatches missing("missing"),
      unexpected("that the config.json does not account for"), twice("there twice"),
      shapes("of another shape"), types("of another type");
  auto expected = parameter_shapes(config);
  std::set<std::string> seen;
  for (const FoundTensor& one : found) {
    const std::string name = checkpoint::quote(one.name);
    const auto place = expected.find(one.parameter);
    if (place == expected.end()) {
      unexpected.add(fmt::format("{} {}", name, checkpoint::shape_text(one.shape)));
      continue;
    }
    if (!seen.insert(one.parameter).second) twice.add(name);
    std::vector<std::int64_t> wanted = place->second;
    if (one.transposed) std::ranges::reverse(wanted);
    if (one.shape != wanted)
      shapes.add(fmt::format("{} is {} and should be {}", name, checkpoint::shape_text(one.shape),
                             checkpoint::shape_text(wanted)));
    if (!checkpoint::is_floating(one.dtype))
      types.add(fmt::format("{} is {}, and weights are F64, F32, F16 or BF16", name,
                            checkpoint::name(one.dtype)));
  }
  for (const auto& [parameter, shape] : expected)
    if (!seen.contains(parameter))
      missing.add(
          fmt::format("{} {}", checkpoint::quote(parameter), checkpoint::shape_text(shape)));
  if (!missing.any() && !unexpected.any() && !twice.any() && !shapes.any() && !types.any()) return;
  throw UsageError("'{}' holds other tensors than its config.json describes ({} layers of {}, a "
                   "vocabulary of {}, {} tensors): get the files that belong together{}{}{}{}{}",
                   folder.string(), config.num_layers, config.hidden_size, config.vocab_size,
                   expected.size(), missing.text(), unexpected.text(), twice.text(), shapes.text(),
                   types.text());
}

std::string config_text(checkpoint::CheckpointReader& reader) {
  if (!reader.manifest().files.contains(kConfig))
    throw UsageError("the checkpoint '{}' is of another model or program: it has no config.json of "
                     "a language model, as those of 'lockstep train' have",
                     reader.path().string());
  return reader.read_text_file(kConfig);
}

ModelConfig checked_config(const checkpoint::CheckpointReader& reader, const std::string& text) {
  ModelConfig config = from_hugging_face(text, (reader.path() / kConfig).string());
  std::vector<FoundTensor> found;
  for (const auto& [name, record] : reader.manifest().tensors)
    if (name.starts_with(kModel))
      found.push_back({.name = name,
                       .parameter = name.substr(kModel.size()),
                       .dtype = record.dtype,
                       .shape = record.shape});
  check_tensors(reader.path(), config, found);
  return config;
}

// The tensors of Hugging Face's files that are parameters of ours.
std::vector<std::pair<const checkpoint::StoredTensor*, FoundTensor>> parameters_in(
    const checkpoint::SafetensorsFolder& files, const ModelConfig& config) {
  std::vector<std::pair<const checkpoint::StoredTensor*, FoundTensor>> found;
  for (const checkpoint::StoredTensor& stored : files.tensors())
    if (const auto parameter = parameter_of(config, stored.name()))
      found.push_back({&stored,
                       {.name = stored.name(),
                        .parameter = *parameter,
                        .dtype = stored.entry->dtype,
                        .shape = stored.entry->shape,
                        .transposed = stored_transposed(config, *parameter)}});
  return found;
}

// A model whose output layer is its embedding has no other: files may repeat the embedding, and
// nothing else, under that layer's name.
void check_tied(const fs::path& folder, const checkpoint::SafetensorsFolder& files,
                const ModelConfig& config) {
  if (!config.tie_embeddings) return;
  const checkpoint::StoredTensor *head = nullptr, *embedding = nullptr;
  const std::string embedding_name = layers_of(config).front().name + ".weight";
  for (const checkpoint::StoredTensor& stored : files.tensors()) {
    if (stored.name() == "lm_head.weight") head = &stored;
    if (parameter_of(config, stored.name()) == embedding_name) embedding = &stored;
  }
  if (head == nullptr || embedding == nullptr) return;
  if (head->entry->dtype == embedding->entry->dtype &&
      head->entry->shape == embedding->entry->shape &&
      std::ranges::equal(head->bytes(), embedding->bytes()))
    return;
  throw UsageError(
      "'{}' has an output layer of its own, 'lm_head.weight', that is not '{}', and its "
      "config.json says that they are one (tie_word_embeddings, true where it is left "
      "out): set that to false if the layer is the model's",
      folder.string(), embedding->name());
}

// The config of a folder of Hugging Face's, whose tensors are checked.
ModelConfig checked_config(const fs::path& folder, const checkpoint::SafetensorsFolder& files) {
  ModelConfig config = from_hugging_face(files.text_file(kConfig), (folder / kConfig).string());
  std::vector<FoundTensor> found;
  for (auto& [stored, tensor] : parameters_in(files, config)) found.push_back(std::move(tensor));
  check_tensors(folder, config, found);
  check_tied(folder, files, config);
  return config;
}

struct Exported {
  std::string tensor;  // of the checkpoint
  TensorDeclaration declaration;
  bool transposed = false;
  std::uint64_t bytes = 0;
};

std::vector<Exported> weights_of(const checkpoint::CheckpointReader& reader,
                                 const ModelConfig& config) {
  std::vector<Exported> all;
  for (const auto& [name, record] : reader.manifest().tensors) {
    if (!name.starts_with(kModel)) continue;
    const std::string parameter = name.substr(kModel.size());
    Exported one{
        .tensor = name,
        .declaration = {file_name_of(parameter), record.dtype, record.shape},
        .transposed = record.shape.size() == 2 && stored_transposed(config, parameter),
        .bytes = checkpoint::piece_bytes(record.dtype, mesh::Placement::full(record.shape))};
    if (one.transposed) std::ranges::reverse(one.declaration.shape);
    all.push_back(std::move(one));
  }
  return all;
}

std::vector<std::vector<Exported>> in_files(const std::vector<Exported>& weights,
                                            std::uint64_t largest) {
  std::vector<std::vector<Exported>> files(1);
  std::uint64_t bytes = 0;
  for (const Exported& one : weights) {
    if (!files.back().empty() && bytes + one.bytes > largest) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += one.bytes;
    files.back().push_back(one);
  }
  return files;
}

void write_weights(checkpoint::CheckpointReader& reader, const fs::path& path,
                   const std::vector<Exported>& weights, checkpoint::FolderHashes& hashes) {
  std::vector<TensorDeclaration> declarations;
  std::map<std::string, const Exported*> by_name;
  for (const Exported& one : weights) {
    declarations.push_back(one.declaration);
    by_name[one.declaration.name] = &one;
  }
  checkpoint::SafetensorsWriter writer(path, declarations, {{"format", "pt"}});
  for (const checkpoint::TensorEntry& entry : writer.entries()) {
    const Exported& one = *by_name.at(entry.name);
    const TensorRecord& record = *reader.find(one.tensor);
    std::vector<std::byte> bytes(one.bytes);
    reader.read(one.tensor, mesh::Placement::full(record.shape), bytes);
    if (one.transposed)
      bytes = transposed(bytes, record.shape[0], record.shape[1],
                         checkpoint::bits_of(record.dtype) / 8);
    writer.write(bytes);
    hashes.add_tensor(path.filename().string(), entry.name, bytes);
  }
  writer.commit();
}

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw FileError("cannot make the folder '{}': {}", folder.string(), error.message());
  for (const char* file :
       {kConfig, checkpoint::kModelFile, checkpoint::kModelIndex, checkpoint::kHashesFile})
    if (is_there(folder / file))
      throw UsageError("'{}' has a {} already: name a new folder", folder.string(), file);
}

}  // namespace

ModelConfig read_model_config(const fs::path& folder) {
  if (!checkpoint::is_checkpoint(folder))
    return checked_config(folder, checkpoint::SafetensorsFolder(folder));
  checkpoint::CheckpointReader reader(folder);
  return read_model_config(reader);
}

ModelConfig read_model_config(checkpoint::CheckpointReader& reader) {
  return checked_config(reader, config_text(reader));
}

std::vector<std::string> export_to_hugging_face(checkpoint::CheckpointReader& reader,
                                                const fs::path& folder,
                                                const ExportOptions& options) {
  const std::string config = config_text(reader);
  const auto weights = weights_of(reader, checked_config(reader, config));
  const auto files = in_files(weights, options.largest_file);
  make_folder(folder);
  std::vector<std::string> written = {kConfig};
  checkpoint::FolderHashes hashes;
  hashes.add_text(kConfig, config);
  nlohmann::json map = nlohmann::json::object();
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const std::string name =
        files.size() == 1 ? checkpoint::kModelFile
                          : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
    write_weights(reader, folder / name, files[i], hashes);
    written.push_back(name);
    for (const Exported& one : files[i]) {
      map[one.declaration.name] = name;
      total += one.bytes;
    }
  }
  if (files.size() > 1) {
    const nlohmann::json index = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
    write_durably(folder / checkpoint::kModelIndex, index.dump(2) + '\n');
    written.emplace_back(checkpoint::kModelIndex);
  }
  write_durably(folder / checkpoint::kHashesFile, hashes.text());
  written.emplace_back(checkpoint::kHashesFile);
  // Last: with it the folder is a model.
  write_durably(folder / kConfig, config);
  return written;
}

fs::path import_from_hugging_face(const fs::path& folder, const fs::path& run_folder) {
  // A model among the checkpoints of a run, or in place of one, would be taken for its own.
  for (const fs::path& taken : {run_folder, run_folder / "checkpoints"})
    if (const auto newest = checkpoint::newest_checkpoint(taken))
      throw UsageError("'{}' has a checkpoint already, '{}': name a new folder",
                       run_folder.string(), newest->path.string());
  if (checkpoint::is_checkpoint(folder))
    throw UsageError("'{}' is a checkpoint of Lockstep's already: model.from and 'lockstep sample' "
                     "take it as it is",
                     folder.string());
  const checkpoint::SafetensorsFolder files(folder);
  const ModelConfig config = checked_config(folder, files);
  std::vector<checkpoint::PieceInMemory> pieces;
  std::vector<std::unique_ptr<std::vector<std::byte>>> turned;
  for (auto& [stored, tensor] : parameters_in(files, config)) {
    std::vector<std::int64_t>& shape = tensor.shape;
    std::span<const std::byte> bytes = stored->bytes();
    if (tensor.transposed) {
      turned.push_back(std::make_unique<std::vector<std::byte>>(
          transposed(bytes, shape[0], shape[1], checkpoint::bits_of(tensor.dtype) / 8)));
      bytes = *turned.back();
      std::ranges::reverse(shape);
    }
    const auto whole = mesh::Placement::full(shape);
    pieces.push_back({std::string(kModel) + tensor.parameter, tensor.dtype, shape, whole, bytes});
  }
  checkpoint::CheckpointWriter writer(run_folder, 0);
  checkpoint::Manifest manifest =
      write_piece_file(writer.path(), checkpoint::piece_file_name(0), pieces);
  add(manifest, checkpoint::write_text_file(writer.path(), kConfig, to_hugging_face(config)));
  write_durably(writer.path() / checkpoint::kManifestFile, to_text(manifest));
  return writer.commit();
}

}  // namespace lockstep::models
