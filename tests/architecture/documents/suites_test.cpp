// The pages that say what was tested name programs, suites and tests that exist, and files that do.
#include <algorithm>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "markdown.h"

namespace lockstep::documents {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// The names that the tests of a tree have.
class Suites {
 public:
  explicit Suites(const fs::path& root) {
    for (const auto& entry : fs::recursive_directory_iterator(root / "tests")) {
      const fs::path& file = entry.path();
      if (file.filename() == "CMakeLists.txt") read_programs(read_text(file));
      if (file.extension() == ".cpp" || file.extension() == ".h") read_tests(read_text(file));
    }
  }
  Suites(std::set<std::string> programs, const std::string& source)
      : programs_(std::move(programs)) {
    read_tests(source);
  }

  bool has_program(const std::string& name) const { return programs_.contains(name); }

  // "Suite", "Suite.Test", "Suite.Begins…", "Beg…", "…PartOfATest", or "Test".
  bool has_test(std::string name) const {
    const std::string more = "…";
    const bool begins = name.ends_with(more);
    if (begins) name.erase(name.size() - more.size());
    if (name.starts_with(more))
      return any([part = name.substr(more.size())](const std::string& test) {
        return test.find(part) != std::string::npos;
      });
    return any([&](const std::string& test) {
      const std::string suite = test.substr(0, test.find('.'));
      if (begins) return test.starts_with(name);
      return test == name || suite == name || test.substr(suite.size() + 1) == name;
    });
  }

  // The names on a page that no test has, each with its line.
  std::vector<std::string> missing(const std::string& page) const {
    static const std::regex of_program(R"(`(\w+)`: (?=`[…A-Z]))");
    static const std::regex span(R"(`([^`]+)`)");
    static const std::regex test(R"((?:…)?[A-Z]\w*(?:\.\w*)?(?:…)?)");
    static const std::regex row(R"(`((?:Whole)?Row\d+[A-Za-z]\w*)`)");
    std::vector<std::string> found;
    std::istringstream lines(page);
    int number = 0;
    for (std::string line; std::getline(lines, line);) {
      const std::string where = std::to_string(++number) + ": ";
      for (std::sregex_iterator one(line.begin(), line.end(), row), last; one != last; ++one)
        if (!has_test((*one)[1])) found.push_back(where + (*one)[1].str());
      for (std::sregex_iterator one(line.begin(), line.end(), of_program), last; one != last;
           ++one) {
        if (!has_program((*one)[1])) found.push_back(where + (*one)[1].str());
        const auto begin = static_cast<std::size_t>(one->position() + one->length());
        const std::string list = line.substr(begin, line.find_first_of(";|", begin) - begin);
        for (std::sregex_iterator name(list.begin(), list.end(), span); name != last; ++name)
          if (std::regex_match((*name)[1].str(), test) && !has_test((*name)[1]))
            found.push_back(where + (*name)[1].str());
      }
    }
    return found;
  }

 private:
  void read_programs(const std::string& cmake) {
    static const std::regex call(R"((?:lockstep_test\(|add_test\(NAME )\s*(\w+))");
    for (std::sregex_iterator one(cmake.begin(), cmake.end(), call), last; one != last; ++one)
      programs_.insert((*one)[1]);
  }

  void read_tests(const std::string& source) {
    static const std::regex call(R"(TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\))");
    for (std::sregex_iterator one(source.begin(), source.end(), call), last; one != last; ++one)
      tests_.insert((*one)[1].str() + "." + (*one)[2].str());
  }

  template <typename Condition>
  bool any(const Condition& condition) const {
    return std::ranges::any_of(tests_, condition);
  }

  std::set<std::string> programs_;
  std::set<std::string> tests_;  // "Suite.Test"
};

TEST(Documents, NameSuitesThatAreThere) {
  const fs::path root = LOCKSTEP_SOURCE_DIR;
  const Suites suites(root);
  for (const Page& page : pages_of(root))
    for (const std::string& name : suites.missing(read_text(root / page.name)))
      ADD_FAILURE() << page.name << ":" << name << " is no test of this tree";
  // Programs that stand alone.
  const std::string tested = read_text(root / "docs/tested.md");
  const std::string heading = "## What only `--long` runs\n";
  const auto begin = tested.find(heading);
  ASSERT_NE(begin, std::string::npos);
  const Page rest = parse_page(
      "docs/tested.md",
      tested.substr(begin + heading.size(), tested.find("\n## ", begin) - begin - heading.size()));
  int num_programs = 0;
  for (const Piece& span : rest.spans)
    if (span.text.find_first_not_of("abcdefghijklmnopqrstuvwxyz_") == std::string::npos) {
      ++num_programs;
      EXPECT_TRUE(suites.has_program(span.text)) << span.text;
    }
  EXPECT_GE(num_programs, 7);
}

// The files and folders of a tree.
class Files {
 public:
  explicit Files(const fs::path& root) : root_(root) {
    for (const char* folder : {"lockstep", "cli", "tests", "bench", "examples", "cmake"})
      for (const auto& entry : fs::recursive_directory_iterator(root / folder))
        paths_.insert("/" + fs::relative(entry.path(), root).generic_string());
  }

  // A path may begin anywhere: "spec/spec.cpp" is in the folder of each model family.
  bool has(std::string path) const {
    if (path.ends_with('/')) path.pop_back();
    return fs::exists(root_ / path) || std::ranges::any_of(paths_, [&](const std::string& one) {
             return one.ends_with("/" + path);
           });
  }

 private:
  const fs::path root_;
  std::set<std::string> paths_;
};

// README.md and docs/ name few files of the source, and these two many.
TEST(Documents, NameFilesThatAreThere) {
  static const std::regex file(R"((?:\w+/)+\w+\.(?:cpp|h|cu|cuh|cmake|txt))");
  static const std::regex any_file(R"([\w/]+\.(?:cpp|h|cu|cuh|cmake|txt))");
  static const std::regex folder(R"((?:tests|bench|examples|lockstep|cli)(?:/\w+)+/?|(?:\w+/)+)");
  const fs::path root = LOCKSTEP_SOURCE_DIR;
  const Files files(root);
  std::vector<Page> pages = pages_of(root);
  for (const char* name : {"ARCHITECTURE.md", "CONTRIBUTING.md"})
    pages.push_back(parse_page(name, read_text(root / name)));
  int num_found = 0;
  for (const Page& page : pages) {
    const bool is_of_source = page.name == "ARCHITECTURE.md" || page.name == "CONTRIBUTING.md";
    for (const Piece& span : page.spans) {
      const bool is_path = is_of_source ? std::regex_match(span.text, any_file) ||
                                              std::regex_match(span.text, folder)
                                        : std::regex_match(span.text, file);
      if (!is_path) continue;
      ++num_found;
      EXPECT_TRUE(files.has(span.text)) << page.name << ":" << span.line << ": " << span.text;
    }
  }
  EXPECT_GT(num_found, 100);
}

TEST(Documents, SuitesThatAreNotThereAreFound) {
  const Suites suites({"launch"},
                      "TEST(Watch, NamesAStop) {}\nTEST_F(\n    Row04Stopped, Ends) {}");
  EXPECT_THAT(
      suites.missing("| `Row04Stopped` | `launch`: `Watch`, `…AStop` (a: `b`), `NamesAStop`, "
                     "`Watch.Names…`; `nope`: see |"),
      IsEmpty());
  EXPECT_THAT(suites.missing("\n`Row05Stuck`, `Row04Stopped`\n`lanch`: `Watch`, `Watch.Nam`, "
                             "`…Step`; `launch`: `Wat`, `Row…`"),
              ElementsAre("2: Row05Stuck", "3: lanch", "3: Watch.Nam", "3: …Step", "3: Wat"));
}

}  // namespace
}  // namespace lockstep::documents
