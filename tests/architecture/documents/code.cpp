#include "code.h"

#include <algorithm>
#include <array>
#include <regex>
#include <sstream>

namespace lockstep::documents {

namespace {

constexpr std::string_view kNamesHeaders = "docs/coming-from.md";

const std::regex kQualified(R"((?:\w+::)+\w+)");

std::string absolute(const std::string& name) {
  constexpr std::array<std::string_view, 5> kRoots = {"lockstep", "torch", "at", "c10", "std"};
  const std::string first = name.substr(0, name.find("::"));
  return std::ranges::find(kRoots, first) != kRoots.end() ? "::" + name : "::lockstep::" + name;
}

// A setting such as ".mode = ParallelMode::FSDP", whose value can be compiled.
bool is_setting(const std::string& span) {
  return span.starts_with('.') && std::regex_search(span, kQualified);
}

class Writer {
 public:
  explicit Writer(const Declared& declared) : declared_(declared) {}

  // Includes the headers that a page names, in its text or its code.
  void include(const Page& page) {
    static const std::regex header(R"(lockstep/[\w/]+\.h)");
    for (const Piece& span : page.spans)
      if (std::regex_match(span.text, header)) text_ << "#include <" << span.text << ">\n";
    for (const Block& block : page.blocks) {
      std::istringstream lines(block.language == "cpp" ? block.code.text : "");
      for (std::string line; std::getline(lines, line);)
        if (line.starts_with("#include")) text_ << line << "\n";
    }
  }

  void page(const Page& page) {
    text_ << "namespace scene {\n";
    for (const Block& one : page.blocks)
      if (one.language == "cpp") block(page.name, one.code);
    for (const Piece& one : page.spans)
      if (is_code(one.text) || is_setting(one.text)) span(page.name, one);
    text_ << "}\n";
  }

  void set_scene() { text_ << "#include \"scene.h\"\n"; }
  std::string finish() const { return text_.str(); }

 private:
  void block(const std::string& page, const Piece& code) {
    std::string body;
    std::istringstream lines(code.text);
    for (std::string line; std::getline(lines, line); body += line + "\n")
      // it is at the front of the page's code already
      if (line.starts_with("#include")) line.clear();
    begin(page, code.line);
    if (body.starts_with('.'))
      text_ << "inline lockstep::DistributedConfig config() { return {\n"
            << place_ << body << "};\n}";
    else if (defines_functions(body))
      text_ << place_ << body;
    else
      text_ << "inline void block() {\n" << place_ << body << "}";
    end();
  }

  void span(const std::string& page, const Piece& span) {
    const std::string& text = span.text;
    static const std::regex member(R"(((?:\w+::)*[A-Z]\w*)::([a-z_]\w*(?:\.\w+)*)(?: = (.+))?)");
    static const std::regex name(R"(((?:\w+::)+\w+)(?:<[^()]*>)?(?:\(\))?)");
    static const std::regex of_object(R"((\w+)(\.|->)(\w+)(?:\(\))?)");
    std::smatch match;
    begin(page, span.line);
    const bool is_part = text.starts_with('{') || is_setting(text) ||
                         text.find("…") != std::string::npos ||
                         text.find("...") != std::string::npos;
    if (is_part) {
      for (std::sregex_iterator one(text.begin(), text.end(), kQualified), last; one != last; ++one)
        declare(one->str());
    } else if (std::regex_match(text, match, member) && match[3].matched) {
      text_ << "inline void set(" << absolute(match[1])
            << "& object) {\nusing namespace lockstep;\n"
            << place_ << "object." << match[2] << " = " << match[3] << ";\n}";
    } else if (std::regex_match(text, match, member) &&
               match[2].str().find('.') != std::string::npos) {
      text_ << place_ << "using Type = decltype(" << absolute(match[1]) << "::" << match[2] << ");";
    } else if (std::regex_match(text, match, name)) {
      declare(match[1]);
    } else if (std::regex_match(text, match, of_object)) {
      text_ << "using Type = std::remove_cvref_t<decltype(" << (match[2] == "->" ? "*" : "")
            << match[1] << ")>;\n"
            << place_ << "struct Derived : Type { using Type::" << match[3] << "; };";
    } else {
      text_ << "inline void statement() {\nusing namespace lockstep;\n" << place_ << text << ";\n}";
    }
    end();
  }

  // Each piece gets a namespace of its own. Compile errors are reported at the piece's place in the
  // page.
  void begin(const std::string& page, int line) {
    place_ = "#line " + std::to_string(line) + " \"" + page + "\"\n";
    text_ << "namespace piece_" << ++number_ << " {\n";
  }
  void end() { text_ << "\n}\n"; }

  void declare(const std::string& name) {
    const std::string whole = absolute(name);
    const std::string scope = whole.substr(0, whole.rfind("::"));
    const std::string place = place_ + "namespace name_" + std::to_string(++number_);
    const std::string type = scope.substr(scope.rfind("::") + 2);
    if (declared_.namespaces.contains(whole.substr(2)))
      text_ << place << " = " << whole << ";\n";
    else if (declared_.enums.contains(type))
      text_ << place << " { using Type = decltype(" << whole << "); }\n";
    else if (type[0] >= 'A' && type[0] <= 'Z')
      text_ << place << " { struct Derived : " << scope << " { using " << whole << "; }; }\n";
    else
      text_ << place << " { using " << whole << "; }\n";
  }

  // Whether the code has a body in braces after outermost parentheses that belong to no loop or
  // branch.
  static bool defines_functions(const std::string& code) {
    static const std::regex control(R"(\s*(for|if|while|switch|else)\b[\s\S]*)");
    int depth = 0;
    std::string statement;
    for (const char c : std::regex_replace(code, std::regex("//[^\n]*"), "")) {
      if (depth == 0 && c == '{' && std::regex_match(statement, std::regex(R"([^=]*\)\s*)")) &&
          !std::regex_match(statement, control))
        return true;
      if (c == '{' || c == '(') ++depth;
      if (c == '}' || c == ')') --depth;
      const bool ends = depth == 0 && (c == ';' || c == '}');
      statement = ends ? "" : statement + c;
    }
    return code.find("TORCH_MODULE(") != std::string::npos;
  }

  const Declared& declared_;
  std::ostringstream text_;
  std::string place_;
  int number_ = 0;
};

}  // namespace

bool is_code(const std::string& span) {
  static const std::regex on_object(R"((\w+)(\.|->)\w+[\s\S]*)");
  std::smatch match;
  if (span.starts_with("Lockstep::") || span.find("](") != std::string::npos) return false;
  if (span.ends_with(';')) return true;
  if (std::regex_match(span, match, on_object))
    return match[2] == "->" || kObjects.contains(match[1]);
  return !span.starts_with('.') && std::regex_search(span, kQualified);
}

Declared declared_in(const std::filesystem::path& root) {
  static const std::regex declaration(R"(\n *(namespace|enum class) ([\w:]+)[ :])");
  Declared declared{.namespaces = {"torch::nn", "torch::data"}, .enums = {}};
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root / "lockstep")) {
    if (entry.path().extension() != ".h") continue;
    const std::string text = read_text(entry.path());
    for (std::sregex_iterator one(text.begin(), text.end(), declaration), last; one != last; ++one)
      ((*one)[1] == "namespace" ? declared.namespaces : declared.enums).insert((*one)[2]);
  }
  return declared;
}

std::string code_of(std::vector<Page> pages, const Declared& declared) {
  Writer writer(declared);
  // The page that says which headers are needed comes first, while no other headers are included.
  std::ranges::stable_sort(pages, {}, [](const Page& page) { return page.name != kNamesHeaders; });
  for (const Page& page : pages) {
    writer.include(page);
    if (&page == &pages.front()) writer.set_scene();
    writer.page(page);
  }
  return writer.finish();
}

}  // namespace lockstep::documents
