// `lockstep sample`: text from a model.
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/models/folders/hugging_face_folder.h>
#include <lockstep/models/generate.h>
#include <lockstep/models/make_model.h>
#include <lockstep/train/language_model_task.h>

#include <cli/flags.h>

namespace lockstep::cli {

namespace {

// Gives out characters once they are whole, and U+FFFD for what is no UTF-8: a model of bytes says
// such things. One thread.
class Utf8Text {
 public:
  // Takes a byte and returns the characters that are complete now.
  std::string add(unsigned char byte);
  // Returns U+FFFD at the end where the last character was cut short.
  std::string finish();

 private:
  std::string pending_;    // the beginning of a character
  int num_missing_ = 0;    // bytes that it still needs
  unsigned char low_ = 0;  // what the next of them may be
  unsigned char high_ = 0;
};

constexpr const char* kReplacement = "\xEF\xBF\xBD";

std::string Utf8Text::add(unsigned char byte) {
  std::string text;
  if (num_missing_ > 0) {
    if (byte >= low_ && byte <= high_) {
      pending_ += static_cast<char>(byte);
      low_ = 0x80;
      high_ = 0xBF;
      if (--num_missing_ == 0) text = std::exchange(pending_, "");
      return text;
    }
    text = finish();
  }
  if (byte < 0x80) return text + static_cast<char>(byte);
  if (byte < 0xC2 || byte > 0xF4) return text + kReplacement;
  // Neither longer forms of short characters, nor surrogates, nor what is above U+10FFFF.
  low_ = byte == 0xE0 ? 0xA0 : byte == 0xF0 ? 0x90 : 0x80;
  high_ = byte == 0xED ? 0x9F : byte == 0xF4 ? 0x8F : 0xBF;
  num_missing_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
  pending_ = static_cast<char>(byte);
  return text;
}

std::string Utf8Text::finish() {
  if (num_missing_ == 0) return "";
  num_missing_ = 0;
  pending_.clear();
  return kReplacement;
}

namespace fs = std::filesystem;

constexpr std::int64_t kBytes = 256;  // the vocabulary of models that read text byte by byte
constexpr int kMostTokens = 10'000'000;

// The values of the flags, as they were given.
struct SampleFlags {
  std::optional<std::string> prompt;
  std::optional<std::string> tokens;
  std::string max_tokens = "400";
  double temperature = 0.8;
  std::string top_k = "0";
  std::string seed = "0";
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
    if (const auto usable = checkpoint::newest_usable(runs); usable.checkpoint) {
      for (const std::string& damage : usable.damages) log::warn("{}", damage);
      if (!usable.damages.empty())
        log::warn("the text is from the checkpoint before, '{}'", usable.checkpoint->path.string());
      return usable.checkpoint->path;
    } else if (!usable.damages.empty()) {
      throw UsageError("{}, and there is no older one that is whole", usable.damages.front());
    }
  if (fs::exists(folder / "model.safetensors") ||
      fs::exists(folder / "model.safetensors.index.json"))
    return folder;
  if (checkpoint::is_checkpoint(folder)) return folder;
  throw UsageError("'{}' holds no model: it is neither a run with checkpoints, nor a checkpoint "
                   "(manifest.json), nor a Hugging Face model (model.safetensors)",
                   folder.string());
}

models::GenerateOptions generate_options(const SampleFlags& flags) {
  constexpr int kAny = std::numeric_limits<int>::max();
  if (flags.prompt && flags.tokens)
    throw UsageError("--prompt and --tokens are two ways to say what the text begins with: leave "
                     "one of them out");
  if (flags.prompt && flags.prompt->empty())
    throw UsageError("--prompt is empty: give the text something to begin with, or leave out the "
                     "flag and it begins with a new line");
  if (!(flags.temperature >= 0) || std::isinf(flags.temperature))
    throw UsageError("--temperature is {}: give 0 for the likeliest token, or a positive number",
                     flags.temperature);
  return {.max_new_tokens = parse_integer(flags.max_tokens, "--max-tokens", 1, kMostTokens),
          .sampling = {
              .temperature = flags.temperature,
              .top_k = parse_integer(flags.top_k, "--top-k", 0, kAny),
              .seed = static_cast<std::uint64_t>(parse_integer(flags.seed, "--seed", 0, kAny))}};
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
  if (tokens.empty())
    throw UsageError("--tokens is empty: give the numbers that the text begins with, as 17,4,256");
  return tokens;
}

// The first tokens of the text, all of which the model knows.
std::vector<std::int64_t> first_tokens(const SampleFlags& flags, std::int64_t vocab_size,
                                       const fs::path& folder) {
  if (flags.tokens) {
    std::vector<std::int64_t> tokens = parse_tokens(*flags.tokens);
    check_tokens(tokens, vocab_size);
    return tokens;
  }
  if (vocab_size != kBytes)
    throw UsageError("the model in '{}' has a vocabulary of {} tokens, not of the {} bytes that "
                     "text is made of: give the prompt as numbers, with --tokens",
                     folder.string(), vocab_size, kBytes);
  std::vector<std::int64_t> tokens;
  for (const char c : flags.prompt.value_or("\n")) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

// Nobody reads the text any more: no mistake, and nothing to say.
struct ReaderGone {};

void put(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0)
    return;
  if (errno == EPIPE) throw ReaderGone();
  throw FileError("the text cannot be written: {}", std::strerror(errno));
}

}  // namespace

int sample(Arguments arguments) {
  SampleFlags flags;
  CLI::App app("Writes text with a model: a run's folder, a checkpoint, or a Hugging Face folder.",
               "lockstep sample");
  show_usage(app, "[FLAGS] FOLDER");
  app.footer("Example: lockstep sample runs/quickstart --prompt 'In the beginning'");
  app.add_option("--prompt", flags.prompt, "what the text begins with (a new line)");
  app.add_option("--tokens", flags.tokens,
                 "the same as numbers, 17,4,256: for models that do not read bytes");
  app.add_option("--max-tokens", flags.max_tokens, "how much to write (400)");
  app.add_option("--temperature", flags.temperature,
                 "0 takes the likeliest token, 1 as the model says (0.8)");
  app.add_option("--top-k", flags.top_k, "among so many likeliest; 0: all (0)");
  app.add_option("--seed", flags.seed, "another seed, another text (0)");
  SplitArguments split = split_at_words(app, arguments, 1);
  if (!parse_flags(app, std::move(split.flags))) return 0;
  if (split.program.empty())
    throw UsageError("no model was given: lockstep sample FOLDER, where FOLDER is a run's, a "
                     "checkpoint's or one of Hugging Face's");
  const models::GenerateOptions options = generate_options(flags);

  const fs::path folder = model_folder(split.program.front());
  const models::ModelConfig config = models::read_model_config(folder);
  const std::vector<std::int64_t> prompt = first_tokens(flags, config.vocab_size, folder);
  const auto model = models::make_model(config, 0);
  train::load_weights(*model, folder);

  Utf8Text text;
  const auto write = [&](std::int64_t token) {
    put(config.vocab_size == kBytes ? text.add(static_cast<unsigned char>(token))
                                    : fmt::format("{} ", token));
  };
  try {
    for (const std::int64_t token : prompt) write(token);
    models::generate(*model, prompt, options, write);
    put(text.finish() + "\n");
  } catch (const ReaderGone&) {
    std::clearerr(stdout);  // it is known, and nothing to complain of at the end
    return 128 + SIGPIPE;
  }
  return 0;
}

}  // namespace lockstep::cli
