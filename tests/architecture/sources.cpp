#include "sources.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <regex>
#include <sstream>

namespace lockstep::architecture {

namespace {

namespace fs = std::filesystem;

std::string without_comments(std::istream& cmake) {
  std::string text;
  for (std::string line; std::getline(cmake, line);) text += line.substr(0, line.find('#')) + "\n";
  return text;
}

Target parse_target(const std::string& arguments) {
  std::istringstream words(arguments);
  Target target;
  words >> target.name;
  std::string list;
  for (std::string word; words >> word;) {
    const bool is_keyword = word == "USES" || word == "LINKS" || word == "SOURCES" ||
                            word == "LIBTORCH" || word == "MODULES" || word == "LOOPS";
    if (is_keyword)
      list = word;
    else if (list == "USES")
      target.uses.push_back(word);
    target.libtorch = target.libtorch || word == "LIBTORCH";
  }
  return target;
}

}  // namespace

std::vector<Target> read_targets(const fs::path& root) {
  static const std::regex call(R"(lockstep_part\(([^)]*)\))");
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(root / "lockstep"))
    if (entry.path().filename() == "CMakeLists.txt") files.push_back(entry.path());
  std::ranges::sort(files);
  std::vector<Target> targets;
  for (const fs::path& file : files) {
    std::ifstream stream(file);
    const std::string text = without_comments(stream);
    for (std::sregex_iterator one(text.begin(), text.end(), call), last; one != last; ++one) {
      targets.push_back(parse_target((*one)[1]));
      targets.back().file = fs::relative(file, root);
    }
  }
  return targets;
}

std::map<std::string, int> defined_namespaces(std::istream& source) {
  static const std::regex opens(R"(namespace (?:([\w:]+) )?\{)");
  // Types are declared, or converted for another library, where they are defined.
  static const std::regex declares(
      R"(template <.*>|(?:class|struct|enum class) \w+(?: : [\w:]+)?;|NLOHMANN_.*)");
  struct Open {
    std::string name;  // with those around it; a nameless one adds nothing
    bool defines = false;
  };
  std::vector<Open> open;
  std::map<std::string, int> found;
  int number = 0;
  for (std::string line; std::getline(source, line);) {
    ++number;
    std::smatch match;
    if (std::regex_match(line, match, opens)) {
      std::string name = open.empty() ? "" : open.back().name;
      if (match[1].matched) name += (name.empty() ? "" : "::") + match[1].str();
      open.push_back({std::move(name)});
    } else if (open.empty() || line.empty() || line.starts_with("//") || line.starts_with("#") ||
               std::regex_match(line, declares)) {
      continue;
    } else if (line.starts_with("}  // namespace") || (line == "}" && !open.back().defines)) {
      open.pop_back();
    } else {
      open.back().defines = true;
      found.emplace(open.back().name, number);
    }
  }
  return found;
}

}  // namespace lockstep::architecture
