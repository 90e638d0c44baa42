#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include <lockstep/train/config/sections.h>

#include <lockstep/base/error.h>
#include <lockstep/base/file.h>
#include <lockstep/data/tokens/token_format.h>

namespace lockstep::train {

namespace {

namespace fs = std::filesystem;

std::string reason(int error) { return std::error_code(error, std::generic_category()).message(); }

// As the user that files will be opened as.
bool allowed(const fs::path& path, int mode) {
  return ::faccessat(AT_FDCWD, path.c_str(), mode, AT_EACCESS) == 0;
}

// Where relative paths of a key start from, for messages.
std::string start_of(const JsonReader& reader, const std::string& key) {
  return reader.root().nearest(key).flag.empty() ? "the config's folder"
                                                 : "the current folder, as --set gave it";
}

// The reason why a file cannot be read, as the end of a sentence about it; "" where it can be.
std::string problem_with(const fs::path& file, const std::string& start) {
  struct stat info {};
  if (::stat(file.c_str(), &info) != 0)
    return fmt::format("cannot be found ({}): check the path; one that is relative starts from "
                       "{}",
                       reason(errno), start);
  if (S_ISDIR(info.st_mode)) return "is a folder: name the files in it";
  if (!S_ISREG(info.st_mode)) return "is no plain file: a pipe or a device cannot be trained on";
  if (!allowed(file, R_OK))
    return fmt::format("cannot be read ({}): change its permissions", reason(errno));
  if (info.st_size == 0) return "is empty: there is nothing in it to train on";
  return "";
}

void check_data(JsonReader& reader, const std::string& key, const std::vector<fs::path>& entries,
                const DataSection& data) {
  std::uintmax_t total = 0;
  bool all_there = true;
  for (std::size_t i = 0; i < entries.size(); ++i)
    for (const fs::path& file :
         data::files_of(entries[i], data::token_format_of(entries[i], data.format))) {
      const std::string item = entries.size() > 1 ? fmt::format("[{}]", i) : "";
      const std::string problem = problem_with(file, start_of(reader, key + item));
      if (!problem.empty()) {
        reader.mistake(key + item, fmt::format("names '{}', which {}", file.string(), problem));
        all_there = false;
        continue;
      }
      std::error_code ignored;
      total += fs::file_size(file, ignored);
    }
  // No format has more tokens than bytes.
  const auto needed = static_cast<std::uintmax_t>(data.sequence_length) + 1;
  if (all_there && !entries.empty() && total < needed)
    reader.mistake(key, fmt::format("has {} bytes in all, too few for one sample of "
                                    "data.sequence_length + 1 = {} tokens",
                                    total, needed));
}

// The newest checkpoint of a run's folder, by its name; empty where the folder is none of a run.
fs::path newest_in_run(const fs::path& folder) {
  fs::path newest;
  std::error_code unreadable;
  for (const auto& entry : fs::directory_iterator(folder / "checkpoints", unreadable))
    if (entry.path().filename().string().starts_with("step-"))
      newest = std::max(newest, entry.path());
  return newest;
}

// The end of a sentence about a run's folder, where a checkpoint is wanted.
std::string run_instead(const fs::path& newest) {
  return fmt::format("is the folder of a run: name one of its checkpoints, such as '{}'",
                     newest.string());
}

void check_resumed(JsonReader& reader, const fs::path& folder) {
  const auto named = [&](const std::string& what) {
    reader.mistake("checkpoint.resume", fmt::format("names '{}', which {}", folder.string(), what));
  };
  if (!is_there(folder))
    named("is not there: it must be \"auto\", \"never\" or the folder of a checkpoint");
  else if (const fs::path newest = newest_in_run(folder); !newest.empty())
    named(run_instead(newest));
}

void check_model_folder(JsonReader& reader, const fs::path& folder) {
  std::error_code ignored;
  const auto named = [&](const std::string& what) {
    reader.mistake("model.from", fmt::format("names '{}', which {}", folder.string(), what));
  };
  if (!is_there(folder)) return named("is not there: check the path");
  if (!fs::is_directory(folder, ignored))
    return named("is no folder: a Hugging Face model is a folder with config.json and "
                 "model.safetensors");
  // Of a checkpoint that lost its manifest, or another of its files, the reader says so.
  if (is_there(folder / "shard-00000.safetensors")) return;
  // A run's folder has a config.json too, which is the run's.
  if (const fs::path newest = newest_in_run(folder); !newest.empty())
    return named(run_instead(newest));
  if (const std::string problem =
          problem_with(folder / "config.json", start_of(reader, "model.from"));
      !problem.empty())
    return named(is_there(folder / "config.json") ? "has a config.json that " + problem
                                                  : "has no config.json");
  // A checkpoint, or a Hugging Face model, has one of these.
  for (const char* weights : {"manifest.json", "model.safetensors", "model.safetensors.index.json"})
    if (is_there(folder / weights)) return;
  named(is_there(folder / "pytorch_model.bin")
            ? "has its weights in pytorch_model.bin, a pickle, which Lockstep never opens: save "
              "them as safetensors"
            : "has no model.safetensors");
}

void check_writable(JsonReader& reader, const std::string& key, const fs::path& folder) {
  fs::path there = folder;
  while (!is_there(there) && there.has_relative_path()) there = there.parent_path();
  struct stat info {};
  const bool known = ::stat(there.c_str(), &info) == 0;
  if (known && !S_ISDIR(info.st_mode)) {
    reader.mistake(key, fmt::format("is '{}', but '{}' is a file: choose another folder",
                                    folder.string(), there.string()));
  } else if (!known || !allowed(there, W_OK | X_OK)) {
    reader.mistake(key, fmt::format("is '{}', but nothing can be written in '{}' ({}): choose "
                                    "another folder",
                                    folder.string(), there.string(), reason(errno)));
  }
}

// Said once where it is in the run's folder, which has been looked at.
void check_monitor(JsonReader& reader, const std::string& key, const fs::path& output,
                   const MonitorSection& monitor) {
  if (!monitor.enabled || monitor.output_path.empty()) return;
  const fs::path within = monitor.output_path.lexically_relative(output);
  if (!within.empty() && *within.begin() != "..") return;
  check_writable(reader, key, monitor.output_path);
}

}  // namespace

void check_files(JsonReader& reader, const TrainConfig& config, NamedFiles files) {
  if (config.model_of == ModelOf::config) {
    check_data(reader, "data.train", config.data.train, config.data);
    check_data(reader, "data.validation", config.data.validation, config.data);
    if (!config.model.from.empty()) check_model_folder(reader, config.model.from);
  }
  if (config.model_of == ModelOf::library && !fs::is_regular_file(config.model.library))
    reader.mistake("model.library",
                   fmt::format("is '{}': there is no such file", config.model.library.string()));
  if (!config.output.empty()) check_writable(reader, "output", config.output);
  check_monitor(reader, "tensorboard.output_path", config.output, config.tensorboard);
  check_monitor(reader, "csv_monitor.output_path", config.output, config.csv_monitor);
  if (config.checkpoint.resume == Resume::from && files == NamedFiles::checked)
    check_resumed(reader, config.checkpoint.resume_from);
}

}  // namespace lockstep::train
