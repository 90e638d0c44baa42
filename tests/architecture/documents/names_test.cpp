// The keys, commands, headers and links that README.md and docs/ name exist. code.h compiles their
// C++.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/optim/registry/registry.h>
#include <lockstep/optim/schedules/schedule.h>
#include <lockstep/train/config/config.h>

#include "code.h"

namespace lockstep::documents {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

void add_identifiers(const std::string& text, std::set<std::string>& words) {
  const auto inside = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
  };
  for (auto begin = text.begin(); begin != text.end();) {
    begin = std::find_if(begin, text.end(), inside);
    const auto end = std::find_if_not(begin, text.end(), inside);
    words.emplace(begin, end);
    begin = end;
  }
}

std::string without_comments(const std::string& code) {
  std::string rest;
  std::istringstream lines(code);
  for (std::string line; std::getline(lines, line);) rest += line.substr(0, line.find("//")) + "\n";
  return rest;
}

// Whether a config may have this key: null asks for the default of any key that exists.
bool is_key(const std::string& path) {
  static std::map<std::string, bool> known;
  const auto has = [&](const std::string& optimizer, const std::string& scheduler) {
    const json config = {{"optimizer", {{"type", optimizer}}},
                         {"scheduler", {{"type", scheduler}}}};
    const std::string flag = path + "=null";
    try {
      train::parse_config(config.dump(), {.name = "c", .folder = ".", .overrides = {flag}});
    } catch (const UsageError& error) {
      const std::string text = error.what();
      const auto at = text.find("--set " + flag + ": ");
      return at == std::string::npos || text.find(" is no key of ", at) == std::string::npos;
    }
    return true;
  };
  const auto [found, is_new] = known.try_emplace(path, false);
  if (is_new) {
    const auto optimizers = optim::optimizer_types();
    const auto schedules = optim::schedule_types();
    for (std::size_t i = 0; i < std::max(optimizers.size(), schedules.size()); ++i)
      found->second = found->second || has(optimizers[i % optimizers.size()].names.front(),
                                           schedules[i % schedules.size()].name);
  }
  return found->second;
}

// The sections of a config, taken from one with every default written out.
const std::set<std::string>& sections() {
  static const std::set<std::string> all = [] {
    std::set<std::string> names = {
        "bf16", "fp16", "elasticity", "zero_optimization", "optimizer.params", "scheduler.params"};
    const json written = json::parse(train::to_json(train::parse_config(
        R"({"model": {"hidden_size": 64, "num_layers": 2, "num_heads": 4},
            "data": {"train": "input.txt", "sequence_length": 32}, "train_batch_size": 8,
            "optimizer": {"params": {"lr": 1e-3}}, "max_steps": 10})",
        {})));
    for (const auto& [key, value] : written.items())
      if (value.is_object()) names.insert(key);
    return names;
  }();
  return all;
}

// The --help text of a verb; nothing if the verb needs the program with LibTorch, which is not
// built.
class Program {
 public:
  std::optional<std::string> help(const std::string& verb) {
    const auto found = known_.find(verb);
    if (found != known_.end()) return found->second;
    const std::string command = LOCKSTEP_PROGRAM " " + verb + " --help 2>&1";
    std::string text;
    std::FILE* pipe = ::popen(command.c_str(), "r");
    char part[4096];
    for (std::size_t got = 0; (got = std::fread(part, 1, sizeof part, pipe)) > 0;)
      text.append(part, got);
    const bool told = ::pclose(pipe) == 0;
    const bool needs_torch = text.find("needs the program lockstep-torch") != std::string::npos;
    EXPECT_TRUE(told || needs_torch) << command << "\n" << text;
    return known_[verb] = needs_torch ? std::nullopt : std::optional(text);
  }

  std::vector<std::string> verbs() {
    static const std::regex verb(R"(\n  (\w+)  )");
    const std::string text = *help("");
    std::vector<std::string> all;
    for (std::sregex_iterator one(text.begin(), text.end(), verb), last; one != last; ++one)
      all.push_back((*one)[1]);
    return all;
  }

 private:
  std::map<std::string, std::optional<std::string>> known_;
};

bool has_word(const std::string& text, const std::string& word) {
  const auto part = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_';
  };
  for (std::size_t at = 0; (at = text.find(word, at)) != std::string::npos; ++at) {
    const std::size_t end = at + word.size();
    if ((at == 0 || !part(text[at - 1])) && (end == text.size() || !part(text[end]))) return true;
  }
  return false;
}

// Whether every name that stands alone must exist: not in pages that map other systems' names to
// ours.
bool names_all_ours(const Page& page) {
  return page.name == "README.md" || page.name == "docs/coming-from.md";
}

class Checker {
 public:
  explicit Checker(fs::path root) : root_(std::move(root)), dev_(read_text(root_ / "dev")) {
    static const std::regex part(R"((?:lockstep_part\(|add_library\(lockstep_)(\w+))");
    for (const auto& entry : fs::recursive_directory_iterator(root_ / "lockstep")) {
      const fs::path& file = entry.path();
      if (file.extension() == ".h") {
        headers_.insert(file.filename().string());
        add_identifiers(without_comments(read_text(file)), words_);
      } else if (file.filename() == "CMakeLists.txt") {
        const std::string text = read_text(file);
        for (std::sregex_iterator one(text.begin(), text.end(), part), last; one != last; ++one)
          parts_.insert((*one)[1]);
      } else if (file.extension() == ".cpp") {
        add_identifiers(read_text(file), source_words_);
      }
    }
    add_identifiers(read_text(root_ / "CMakeLists.txt"), words_);
    for (const auto& entry : fs::directory_iterator(root_ / "cmake"))
      add_identifiers(read_text(entry.path()), words_);
    for (const std::string& verb : program_.verbs()) {
      words_.insert(verb);
      if (const auto text = program_.help(verb)) {
        helps_ += *text;
        add_identifiers(*text, words_);
      }
    }
    helps_ += program_.help("plan schedule").value_or("");
    add_identifiers(read_text(root_ / "docs/config.md"), words_);  // a test compares its keys
  }

  // A line such as "docs/config.md:3: …" for each name that does not exist.
  std::vector<std::string> missing(const Page& page) {
    page_ = &page;
    found_.clear();
    for (const Piece& link : page.links) check_link(link);
    for (const Block& block : page.blocks)
      if (block.language.empty())
        check_terminal(block.code);
      else if (block.language == "json")
        check_json(block.code);
    for (const Piece& span : page.spans) check_span(span);
    return found_;
  }

 private:
  void say(int line, const std::string& what) {
    found_.push_back(page_->name + ":" + std::to_string(line) + ": " + what);
  }

  void check_link(const Piece& link) {
    if (link.text.find("://") != std::string::npos) return;
    const auto hash = link.text.find('#');
    const std::string path = link.text.substr(0, hash);
    const fs::path file =
        path.empty() ? root_ / page_->name : (root_ / page_->name).parent_path() / path;
    if (!fs::exists(file)) return say(link.line, "links to " + link.text + ", which is not there");
    if (hash == std::string::npos) return;
    std::istringstream lines(read_text(file));
    for (std::string line; std::getline(lines, line);)
      if (line.starts_with('#') && anchor_of(line) == link.text.substr(hash + 1)) return;
    say(link.line, "links to " + link.text + ", and no heading there is called so");
  }

  // The anchor that GitHub makes for a heading.
  static std::string anchor_of(const std::string& heading) {
    std::string anchor;
    for (const char c : heading.substr(heading.find_first_not_of("# ")))
      if (c == ' ')
        anchor += '-';
      else if (std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_')
        anchor += static_cast<char>(std::tolower(c));
    return anchor;
  }

  void check_terminal(const Piece& code) {
    std::istringstream lines(code.text);
    std::string command;
    for (int number = code.line; true; ++number) {
      std::string line;
      if (!std::getline(lines, line)) break;
      command += line.substr(0, line.find(" #"));
      if (command.ends_with('\\')) {
        command.back() = ' ';
        continue;
      }
      if (command.starts_with("lockstep ")) check_command(command, number);
      if (command.starts_with("./dev")) check_dev(command, number);
      command.clear();
    }
  }

  // A command may contain another: "lockstep run --nproc-per-node 4 lockstep train config.json" is
  // two.
  void check_command(const std::string& command, int line) {
    std::vector<std::string> words = words_of(command);
    words.erase(words.begin());
    if (words.empty()) return;
    const auto verbs = program_.verbs();
    std::string verb = words.front();
    if (std::ranges::find(verbs, verb) == verbs.end())
      return say(line, "'" + verb + "' is no verb of lockstep");
    auto text = program_.help(verb);
    if (!text) return;
    const bool has_actions = verb == "ckpt" || verb == "plan" || verb == "check" || verb == "bench";
    static const std::regex action(R"([a-z]+)");
    if (has_actions && words.size() > 1 && std::regex_match(words[1], action)) {
      if (!has_word(*text, words[1]))
        return say(line, "'" + words[1] + "' is not in what `lockstep " + verb + " --help` says");
      if (verb == "plan" || verb == "check") text = program_.help(verb + " " + words[1]);
    }
    static const std::regex flag(R"((--[a-z][\w-]*)[^\n]*)");
    for (std::size_t i = 1; i < words.size(); ++i) {
      std::smatch match;
      if (words[i] == "lockstep") {
        std::string rest;
        for (; i < words.size(); ++i) rest += words[i] + " ";
        return check_command(rest, line);
      }
      // This is the program to run, and the following words are its arguments.
      if (verb == "run" && !words[i].starts_with('-') && !words[i - 1].starts_with('-')) return;
      if (std::regex_match(words[i], match, flag) && !has_word(*text, match[1]))
        say(line, "`lockstep " + verb + " --help` has no " + match[1].str());
    }
  }

  void check_dev(const std::string& command, int line) {
    const std::vector<std::string> words = words_of(command);
    if (words.size() > 1 && !std::regex_search(dev_, std::regex("\n  " + words[1] + "[ \n]")))
      say(line, "'" + words[1] + "' is no verb of ./dev");
    for (const std::string& word : words)
      if (word.starts_with("--") && words[1] != "bench" && !has_word(dev_, word))
        say(line, "./dev has no " + word);
  }

  void check_key(const std::string& path, int line) {
    if (!is_key(path)) say(line, path + " is no key of a config");
  }

  // Checks a config, or members of one. Other JSON documents of ours begin with their format.
  void check_json(const Piece& code) {
    for (const std::string& text : {code.text, "{" + code.text + "}"}) {
      const json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
      if (value.is_object())
        return value.contains("format") ? void() : check_json(value, "", code.line);
    }
    say(code.line, "this is no JSON");
  }

  // A key may be in the top level or in any section; the text around it has to say which.
  void check_json(const json& value, const std::string& path, int line) {
    const auto in_section = [&](const std::string& section) {
      return is_key(section + "." + path);
    };
    if (!value.is_object()) {
      if (!is_key(path) && std::ranges::none_of(sections(), in_section)) check_key(path, line);
      return;
    }
    for (const auto& [key, inner] : value.items())
      check_json(inner, path.empty() ? key : path + "." + key, line);
  }

  void check_span(const Piece& span) {
    static const std::regex header(R"(lockstep/[\w/]+\.h)");
    static const std::regex bare_header(R"(\w+\.h)");
    static const std::regex target(R"(Lockstep::(\w+))");
    static const std::regex variable(R"((LOCKSTEP_\w+)(=.*)?)");
    static const std::regex flag(R"((--[a-z][\w-]*)( [\w:.]+)?)");
    static const std::regex key(R"((\w+)((?:\.\w+)+)(?:: .+)?)");
    static const std::regex member(R"(("\w+": )(.+))");
    static const std::regex alone(R"(\.?([A-Za-z_]\w*)(?:\(.*\))?(?: = .+)?)");
    const std::string& text = span.text;
    std::smatch match;
    if (std::regex_match(text, header)) {
      if (!fs::exists(root_ / text)) say(span.line, "there is no header " + text);
    } else if (names_all_ours(*page_) && std::regex_match(text, bare_header)) {
      if (!headers_.contains(text)) say(span.line, "there is no header " + text);
    } else if (text == "lockstep" || text == "./dev" || is_code(text)) {
      return;
    } else if (text.starts_with("lockstep ")) {
      check_command(text, span.line);
    } else if (text.starts_with("./dev ")) {
      check_dev(text, span.line);
    } else if (std::regex_match(text, match, target)) {
      if (!parts_.contains(match[1])) say(span.line, "there is no target " + text);
    } else if (std::regex_match(text, match, variable)) {
      if (!source_words_.contains(match[1])) say(span.line, match[1].str() + " is read nowhere");
    } else if (std::regex_match(text, match, flag)) {
      if (!has_word(helps_, match[1]) && !has_word(dev_, match[1]))
        say(span.line, "no verb of lockstep has the flag " + match[1].str());
    } else if (std::regex_match(text, match, key) && sections().contains(match[1])) {
      if (!is_of_a_file(text)) check_key(match[1].str() + match[2].str(), span.line);
    } else if (std::regex_match(text, match, member)) {
      const json value = json::parse("{" + text + "}", nullptr, /*allow_exceptions=*/false);
      if (!value.is_discarded()) check_json(value, "", span.line);
    } else if (names_all_ours(*page_) && std::regex_match(text, match, alone)) {
      if (!words_.contains(match[1])) say(span.line, "no header, key or command has " + text);
    }
  }

  // Whether it is a file such as "model.safetensors", or a tensor in one such as
  // "model.norm.weight".
  static bool is_of_a_file(const std::string& text) {
    constexpr std::array<std::string_view, 7> kEndings = {".safetensors", ".json", ".csv",   ".bin",
                                                          ".idx",         ".md",   ".weight"};
    return std::ranges::any_of(kEndings, [&](std::string_view end) { return text.ends_with(end); });
  }

  fs::path root_;
  std::string dev_;
  Program program_;
  std::string helps_;
  std::set<std::string> headers_, parts_, words_, source_words_;
  const Page* page_ = nullptr;
  std::vector<std::string> found_;
};

Checker& checker_of_the_tree() {
  static Checker checker(LOCKSTEP_SOURCE_DIR);
  return checker;
}

TEST(Documents, NameOnlyWhatIsThere) {
  Checker& checker = checker_of_the_tree();
  std::size_t num_spans = 0;
  for (const Page& page : pages_of(LOCKSTEP_SOURCE_DIR)) {
    num_spans += page.spans.size();
    for (const std::string& name : checker.missing(page)) ADD_FAILURE() << name;
  }
  EXPECT_GT(num_spans, 1000U) << "pages are read";
}

// lockstep/lockstep.h includes the public headers, and docs/api.md says what is in each.
TEST(Documents, ListTheHeadersThatProgramsInclude) {
  const fs::path root = LOCKSTEP_SOURCE_DIR;
  const std::string begin = "#include <";
  std::set<std::string> included = {"lockstep/lockstep.h"}, documented;
  std::istringstream lines(read_text(root / "lockstep/lockstep.h"));
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with(begin))
      included.insert(line.substr(begin.size(), line.find('>') - begin.size()));
  for (const Page& page : pages_of(root))
    if (page.name == "docs/api.md")
      for (const Piece& span : page.spans)
        if (span.text.ends_with(".h")) documented.insert(span.text);
  EXPECT_GT(included.size(), 30U) << "the list is read";
  EXPECT_EQ(documented, included);
}

TEST(Documents, AreFoundWhereTheyNameWhatIsNotThere) {
  Checker& checker = checker_of_the_tree();
  const auto missing = [&](const std::string& text) {
    std::vector<std::string> found = checker.missing(parse_page("README.md", text));
    for (std::string& one : found) one = one.substr(one.find(": ") + 2);
    return found;
  };
  EXPECT_THAT(
      missing("`lockstep/checkpoint/checkpoint.h`, `tensors.hpp`, `checkpointer.h`, `nope.h`"),
      ElementsAre("there is no header lockstep/checkpoint/checkpoint.h",
                  "there is no header nope.h"));
  EXPECT_THAT(missing("`checkpoint.resume: \"never\"`, `checkpoint.resum`, `model.safetensors`"),
              ElementsAre("checkpoint.resum is no key of a config"));
  EXPECT_THAT(missing("`\"model\": {\"from\": \"F\"}`, `\"model\": {\"form\": \"F\"}`, "
                      "`\"enabled\": true`, `\"enable\": true`"),
              ElementsAre("model.form is no key of a config", "enable is no key of a config"));
  EXPECT_THAT(
      missing("```json\n\"parallel\": {\"tensor\": 2, \"pipelin\": 2}\n```\n```json\n{a}\n```"),
      ElementsAre("parallel.pipelin is no key of a config", "this is no JSON"));
  EXPECT_THAT(missing("`lockstep ckpt export RUN`, `lockstep ckpt exprt RUN`, `lockstep trian`"),
              ElementsAre("'exprt' is not in what `lockstep ckpt --help` says",
                          "'trian' is no verb of lockstep"));
  EXPECT_THAT(missing("```\nlockstep run --nproc-per-node 2 \\\n  --master-adr H ./own --own-flag\n"
                      "./dev tset\n./dev test --quik   # --no-flag\n```\n"),
              ElementsAre("`lockstep run --help` has no --master-adr", "'tset' is no verb of ./dev",
                          "./dev has no --quik"));
  EXPECT_THAT(missing("`lockstep run --nnodes 2 lockstep train c.json --sett a=1`, `--spare 3`"),
              ElementsAre("`lockstep train --help` has no --sett",
                          "no verb of lockstep has the flag --spare"));
  EXPECT_THAT(missing("`Lockstep::train`, `Lockstep::trains`, `LOCKSTEP_FLIGHT_DIR=d`, "
                      "`LOCKSTEP_FLY`"),
              ElementsAre("there is no target Lockstep::trains", "LOCKSTEP_FLY is read nowhere"));
  EXPECT_THAT(missing("`load_checkpoint()`, `save_checkpoints()`, `.chunks = 3`, `.chonks = 3`"),
              ElementsAre("no header, key or command has save_checkpoints()",
                          "no header, key or command has .chonks = 3"));
  EXPECT_THAT(missing("[a](docs/config.md#data) [b](docs/config.md#dta) [c](docs/confg.md)"),
              ElementsAre("links to docs/config.md#dta, and no heading there is called so",
                          "links to docs/confg.md, which is not there"));
  EXPECT_THAT(missing("<!-- others' names -->\n`nobody_has_this`\n\n"
                      "| PyTorch | Lockstep |\n|---|---|\n| `nobody_has_this` | `wrap_model` |"),
              IsEmpty());
}

TEST(Documents, CodeIsCompiledAsThePageHasIt) {
  const Declared declared{.namespaces = {"lockstep::nn"}, .enums = {"ReduceOp"}};
  const auto code = [&](const std::string& text) {
    return code_of({parse_page("a.md", text)}, declared);
  };
  EXPECT_THAT(code("`checkpoint::save_checkpoint()`"),
              HasSubstr("#line 1 \"a.md\"\nnamespace name_2 { using "
                        "::lockstep::checkpoint::save_checkpoint; }"));
  EXPECT_THAT(code("`lockstep::nn`"), HasSubstr(" = ::lockstep::nn;"));
  EXPECT_THAT(code("`comm::ReduceOp::mean`"),
              HasSubstr("decltype(::lockstep::comm::ReduceOp::mean)"));
  EXPECT_THAT(code("`comm::Work::wait`"),
              HasSubstr("struct Derived : ::lockstep::comm::Work { using "));
  EXPECT_THAT(code("`DistributedConfig::ddp.buckets.bytes`"),
              HasSubstr("decltype(::lockstep::DistributedConfig::ddp.buckets.bytes)"));
  EXPECT_THAT(code("`DistributedConfig::fsdp.units = n`"), HasSubstr("object.fsdp.units = n;"));
  EXPECT_THAT(code("`dist.backward()`"), HasSubstr("using Type::backward;"));
  EXPECT_THAT(code("\n`dist.full_gradient(model,\n\"name\")`"),
              HasSubstr("#line 2 \"a.md\"\ndist.full_gradient(model, \"name\");"));
  EXPECT_THAT(code("`.mode = ParallelMode::FSDP`"), HasSubstr("::lockstep::ParallelMode::FSDP"));
  EXPECT_THAT(code("`plan::estimate_memory(7, …)`"),
              HasSubstr("using ::lockstep::plan::estimate_memory;"));
  EXPECT_THAT(
      code("```cpp\n#include <a.h>\nauto x = f([] { return 1; });\n```"),
      ::testing::AllOf(::testing::StartsWith("#include <a.h>\n#include \"scene.h\"\n"),
                       HasSubstr("inline void block() {\n#line 2 \"a.md\"\n\nauto x = f(")));
  EXPECT_THAT(code("```cpp\nint f(int a,\n      int b) {\n}\n```"), Not(HasSubstr("void block()")));
  EXPECT_THAT(code("```cpp\nfor (;;) {\n}\n```"), HasSubstr("void block()"));
  EXPECT_THAT(code("```cpp\n.fsdp = {}\n```"), HasSubstr("DistributedConfig config() { return {"));
  EXPECT_THAT(code("`data.train`, `Lockstep::train`, `model.from`"), Not(HasSubstr("piece_1")));
}

}  // namespace
}  // namespace lockstep::documents
