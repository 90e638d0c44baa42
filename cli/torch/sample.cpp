// `lockstep sample`: text from a model.
#include <cstdio>
#include <limits>
#include <sstream>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/folder.h>
#include <lockstep/models/generate.h>
#include <lockstep/models/hugging_face.h>
#include <lockstep/models/make_model.h>
#include <lockstep/train/language_model_task.h>

#include <cli/flags.h>
#include <cli/torch/utf8_text.h>

namespace lockstep::cli {

namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kBytes = 256;  // the vocabulary of models that read text byte by byte

struct Flags {
  std::string folder;
  std::string prompt = "\n";
  std::string tokens;
  models::GenerateOptions generate = {.max_new_tokens = 400, .sampling = {.temperature = 0.8}};
};

// A run's folder stands for its newest checkpoint.
fs::path model_folder(const fs::path& folder) {
  if (!fs::exists(folder))
    throw UsageError("'{}' does not exist: name the folder of a run, of a checkpoint, or of a "
                     "Hugging Face model",
                     folder.string());
  if (!fs::is_directory(folder))
    throw UsageError("'{}' is a file: name the folder that it is in", folder.string());
  // A run's folder has a config.json too, which is the run's.
  for (const fs::path& runs : {folder / "checkpoints", folder})
    if (const auto newest = checkpoint::newest_checkpoint(runs)) return newest->path;
  if (fs::exists(folder / "model.safetensors") ||
      fs::exists(folder / "model.safetensors.index.json"))
    return folder;
  throw UsageError("'{}' holds no model: neither a model.safetensors, as checkpoints and Hugging "
                   "Face's folders have, nor the checkpoints of a run",
                   folder.string());
}

void check(const Flags& flags) {
  if (flags.generate.max_new_tokens < 1)
    throw UsageError("--max-tokens is {}: it must be at least 1", flags.generate.max_new_tokens);
  if (flags.prompt.empty() && flags.tokens.empty())
    throw UsageError("--prompt is empty: give the text something to begin with, or leave out the "
                     "flag and it begins with a new line");
  // What the other flags may be, the choice itself knows; of one score there is only one.
  models::choose_token(std::vector<float>{0}, flags.generate.sampling, 0);
}

void check_tokens(const std::vector<std::int64_t>& prompt, std::int64_t vocab_size) {
  for (const std::int64_t token : prompt)
    if (token >= vocab_size)
      throw UsageError("--tokens has {}, and the model knows the tokens 0 to {}", token,
                       vocab_size - 1);
}

std::vector<std::int64_t> parse_tokens(const std::string& text) {
  std::vector<std::int64_t> tokens;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');)
    tokens.push_back(parse_integer(word, "--tokens", 0, std::numeric_limits<int>::max()));
  return tokens;
}

}  // namespace

int sample(Arguments arguments) {
  Flags flags;
  CLI::App app("Writes text with a model: a run's folder, a checkpoint, or a Hugging Face folder.",
               "lockstep sample");
  app.get_formatter()->label("OPTIONS", "FLAGS] FOLDER");
  app.footer("Example: lockstep sample runs/quickstart --prompt 'In the beginning'");
  app.add_option("--prompt", flags.prompt, "what the text begins with");
  app.add_option("--tokens", flags.tokens,
                 "the same as numbers, 17,4,256: for models that do not read bytes");
  app.add_option("--max-tokens", flags.generate.max_new_tokens, "how much to write (400)");
  app.add_option("--temperature", flags.generate.sampling.temperature,
                 "0 takes the likeliest token, 1 as the model says (0.8)");
  app.add_option("--top-k", flags.generate.sampling.top_k, "among so many likeliest; 0: all");
  app.add_option("--seed", flags.generate.sampling.seed, "another seed, another text (0)");
  SplitArguments split = split_at_words(app, arguments, 1);
  if (!parse_flags(app, std::move(split.flags))) return 0;
  if (split.program.empty())
    throw UsageError("no model was given: lockstep sample FOLDER, where FOLDER is a run's, a "
                     "checkpoint's or one of Hugging Face's");
  check(flags);

  const fs::path folder = model_folder(split.program.front());
  const models::ModelConfig config = models::read_model_config(folder);
  const bool bytes = config.vocab_size == kBytes;
  if (!bytes && flags.tokens.empty())
    throw UsageError("the model in '{}' has a vocabulary of {} tokens, not of the {} bytes that "
                     "text is made of: give the prompt as numbers, with --tokens",
                     folder.string(), config.vocab_size, kBytes);
  std::vector<std::int64_t> prompt = parse_tokens(flags.tokens);
  if (flags.tokens.empty())
    for (const char c : flags.prompt) prompt.push_back(static_cast<unsigned char>(c));
  check_tokens(prompt, config.vocab_size);
  const auto model = models::make_model(config, 0);
  train::load_weights(*model, folder);

  Utf8Text text;
  const auto write = [&](std::int64_t token) {
    fmt::print("{}",
               bytes ? text.add(static_cast<unsigned char>(token)) : fmt::format("{} ", token));
    std::fflush(stdout);
  };
  for (const std::int64_t token : prompt) write(token);
  models::generate(*model, prompt, flags.generate, write);
  fmt::print("{}\n", text.finish());
  return 0;
}

}  // namespace lockstep::cli
