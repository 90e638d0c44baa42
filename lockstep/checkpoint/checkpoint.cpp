#include <lockstep/checkpoint/checkpoint.h>

#include <lockstep/base/durable_file.h>
#include <lockstep/checkpoint/folder.h>
#include <lockstep/checkpoint/safetensors.h>
#include <lockstep/checkpoint/safetensors/free_space.h>
#include <lockstep/checkpoint/safetensors/quote.h>
#include <lockstep/checkpoint/safetensors/writer.h>

namespace lockstep::checkpoint {

namespace {

// For state.json, folders and what a file system adds to them.
constexpr std::uint64_t kSpareBytes = 1 << 16;

void check_file_names(const std::map<std::string, std::string>& files) {
  for (const auto& [name, text] : files) {
    const bool ours = name == kModelFile || name == kOptimizerFile || name == kGeneratorFile ||
                      name == kStateFile;
    if (ours || name.empty() || name.front() == '.' || name.find('/') != std::string::npos)
      throw UsageError("{} cannot be added to a checkpoint: {}", quote(name),
                       ours ? "the name is taken" : "it is not the name of a file");
  }
}

std::uint64_t total_bytes(const CheckpointContents& contents, const SaveOptions& model_options) {
  std::uint64_t total = file_bytes(contents.model, model_options) + file_bytes(contents.optimizer) +
                        contents.state.config.size() + kSpareBytes;
  for (const auto& [name, text] : contents.files) total += text.size();
  for (const auto& [name, bytes] : contents.state.generators) total += bytes.size();
  return total;
}

void save_generators(const std::filesystem::path& path, const TrainingState& state) {
  std::vector<TensorDeclaration> declarations;
  for (const auto& [name, bytes] : state.generators)
    declarations.push_back({name, DType::u8, {static_cast<std::int64_t>(bytes.size())}});
  SafetensorsWriter writer(path, declarations);
  for (const TensorEntry& entry : writer.entries()) writer.write(state.generators.at(entry.name));
  writer.commit();
}

void load_generators(const std::filesystem::path& path, TrainingState& state) {
  const SafetensorsFile file(path);
  for (const TensorEntry& entry : file.entries()) {
    const auto bytes = file.bytes(entry);
    state.generators[entry.name].assign(bytes.begin(), bytes.end());
  }
}

}  // namespace

std::filesystem::path save_checkpoint(const std::filesystem::path& run_folder,
                                      const CheckpointContents& contents) {
  const SaveOptions model_options{.stored = contents.stored};
  check_file_names(contents.files);
  CheckpointWriter writer(run_folder, contents.state.step);
  check_free_space(run_folder, total_bytes(contents, model_options));
  const std::filesystem::path& folder = writer.path();
  save_tensors(folder / kModelFile, contents.model, model_options);
  if (!contents.optimizer.empty()) save_tensors(folder / kOptimizerFile, contents.optimizer);
  save_generators(folder / kGeneratorFile, contents.state);
  for (const auto& [name, text] : contents.files) write_durably(folder / name, text);
  write_durably(folder / kStateFile,
                to_text({.state = contents.state, .files = record_files(folder)}));
  return writer.commit();
}

void check_contents(const CheckpointContents& contents) {
  check_file_names(contents.files);
  total_bytes(contents, {.stored = contents.stored});
  to_text({.state = contents.state, .files = {}});
}

TrainingState load_state(const std::filesystem::path& checkpoint) {
  StateFile file = read_state(checkpoint / kStateFile);
  verify_files(checkpoint, file.files);
  load_generators(checkpoint / kGeneratorFile, file.state);
  return std::move(file.state);
}

TrainingState load_checkpoint(const std::filesystem::path& checkpoint,
                              std::span<const NamedTensor> model,
                              std::span<const NamedTensor> optimizer, const StoredForms& stored) {
  TrainingState state = load_state(checkpoint);
  const SafetensorsFolder weights(checkpoint / kModelFile);
  const LoadOptions options{.stored = stored};
  if (!optimizer.empty()) {
    const SafetensorsFolder moments(checkpoint / kOptimizerFile);
    check_fit(weights, model, options);
    load_tensors_into(moments, optimizer);
  }
  load_tensors_into(weights, model, options);
  return state;
}

}  // namespace lockstep::checkpoint
