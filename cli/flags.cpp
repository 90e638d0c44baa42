#include <cli/flags.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <sstream>

#include <lockstep/base/error.h>
#include <lockstep/base/text.h>
#include <lockstep/device/host/host.h>
#include <lockstep/launch/processes/rank_setup.h>

namespace lockstep::cli {

namespace {

[[noreturn]] void unknown_flag(const CLI::App& app, const std::string& written,
                               const std::string& name) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options())
    for (const std::string& known : option->get_lnames()) names.push_back("--" + known);
  const std::vector<std::string_view> known(names.begin(), names.end());
  throw UsageError("unknown flag '{}'{} ('{} --help' lists all)", written,
                   did_you_mean(name, known), app.get_name());
}

// CLI11 takes brackets around all that follows a program's name.
class UsageFormatter : public CLI::Formatter {
 public:
  explicit UsageFormatter(std::string usage) : usage_(std::move(usage)) {}
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: " + usage_ + "\n";
  }
  // CLI11 puts "..." behind a flag that may be given several times, as if several values could
  // follow it; none of our flags takes more than one.
  std::string make_option_opts(const CLI::Option* option) const override {
    std::string text = CLI::Formatter::make_option_opts(option);
    if (const auto dots = text.find(" ..."); dots != std::string::npos) text.erase(dots, 4);
    return text;
  }

 private:
  std::string usage_;
};

}  // namespace

void show_usage(CLI::App& app, const std::string& what_follows) {
  app.formatter(
      std::make_shared<UsageFormatter>(fmt::format("{} {}", app.get_name(), what_follows)));
}

SplitArguments split_at_program(const CLI::App& app, Arguments arguments) {
  SplitArguments split;
  std::size_t at = 0;
  while (at < arguments.size()) {
    std::string word = arguments[at];
    if (word == "--") {
      ++at;
      break;
    }
    if (word.size() < 2 || word[0] != '-') break;
    const bool is_long = word.starts_with("--");
    const auto name_end = is_long ? std::min(word.find('='), word.size()) : 2;
    std::replace(word.begin() + 2, word.begin() + static_cast<long>(name_end), '_', '-');
    const std::string name = word.substr(0, name_end);
    const CLI::Option* option = app.get_option_no_throw(name);
    if (option == nullptr) unknown_flag(app, arguments[at], name);
    split.flags.push_back(word);
    ++at;
    const bool takes_value = option->get_items_expected_max() > 0;
    if (!takes_value || name_end < word.size()) continue;
    if (at == arguments.size()) throw UsageError("flag '{}' needs a value after it", name);
    split.flags.push_back(arguments[at++]);
  }
  split.program.assign(arguments.begin() + static_cast<long>(at), arguments.end());
  return split;
}

SplitArguments split_at_words(const CLI::App& app, Arguments arguments, std::size_t words) {
  SplitArguments all;
  SplitArguments rest = split_at_program(app, arguments);
  while (true) {
    all.flags.insert(all.flags.end(), rest.flags.begin(), rest.flags.end());
    if (rest.program.empty()) return all;
    if (all.program.size() == words)
      throw UsageError("{} takes no argument '{}' ('{} --help' tells more)", app.get_name(),
                       rest.program.front(), app.get_name());
    all.program.push_back(rest.program.front());
    const std::vector<std::string> behind(rest.program.begin() + 1, rest.program.end());
    rest = split_at_program(app, behind);
  }
}

bool parse_flags(CLI::App& app, std::vector<std::string> flags) {
  std::reverse(flags.begin(), flags.end());  // CLI11 takes them from the back
  try {
    app.parse(flags);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", app.help());
    return false;
  } catch (const CLI::ParseError& error) {
    throw UsageError("{} ('{} --help' tells more)", error.what(), app.get_name());
  }
  return true;
}

int parse_integer(const std::string& text, const std::string& flag, int lowest, int highest) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < lowest || value > highest)
    throw UsageError("{} is '{}': it must be a whole number from {} to {}", flag, text, lowest,
                     highest);
  return value;
}

milliseconds parse_seconds(const std::string& text, const std::string& flag) {
  std::istringstream stream(text);
  double seconds = 0;
  if (!(stream >> seconds) || !stream.eof() || !std::isfinite(seconds) || seconds < 0 ||
      seconds > 1e7)
    throw UsageError("{} is '{}': it must be a number of seconds, such as 30 or 0.5", flag, text);
  return std::chrono::ceil<milliseconds>(std::chrono::duration<double>(seconds));
}

int num_local_ranks(const std::string& text) {
  const std::string flag = "--nproc-per-node";
  const auto num_cores = [] { return device::Host().num_usable_cores(); };
  const int num_gpus = launch::num_visible_gpus();
  if (text == "cpu") return num_cores();
  if (text == "auto") return num_gpus > 0 ? num_gpus : num_cores();
  if (text == "gpu" || text.starts_with("gpu:")) {
    const int wanted =
        text == "gpu" ? num_gpus : parse_integer(text.substr(4), flag, 1, kMostRanks);
    if (num_gpus == 0)
      throw UsageError("{} {}: this host has no GPU (none in /dev/nvidia*, or CUDA_VISIBLE_DEVICES "
                       "hides them): give a plain number, and the ranks use the CPU",
                       flag, text);
    if (wanted > num_gpus)
      throw UsageError(
          "{} {}: {} ranks with a GPU each need {} GPUs, and this host has {} (counted "
          "in /dev/nvidia*, limited by CUDA_VISIBLE_DEVICES): ask for fewer, or give a "
          "plain number so that ranks share GPUs or use the CPU",
          flag, text, wanted, wanted, num_gpus);
    return wanted;
  }
  if (text.empty() || text.find_first_not_of("0123456789-") != std::string::npos)
    throw UsageError("{} is '{}': it must be a number of ranks, auto, cpu, gpu, or gpu:N for N "
                     "ranks with a GPU each",
                     flag, text);
  return parse_integer(text, flag, 1, kMostRanks);
}

}  // namespace lockstep::cli
