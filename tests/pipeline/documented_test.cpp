// docs/pipeline.md shows the code that documented.cpp runs.
#include <string>

#include <gtest/gtest.h>

#include "tests/base/files.h"
#include "tests/ranks/job.h"

namespace lockstep::pipeline {
namespace {

// The text after a mark, up to the next mark.
std::string documented(const std::string& name) {
  const std::string text = lockstep::testing::read_file(LOCKSTEP_PIPELINE_TESTS "/documented.cpp");
  const std::string mark = "// documented: ";
  const auto found = text.find(mark + name + "\n");
  if (found == std::string::npos) return {};
  const auto begin = text.find('\n', found) + 1;
  return text.substr(begin, text.find(mark, begin) - begin);
}

TEST(PipelineDocs, ShowWhatRuns) {
  const std::string docs = lockstep::testing::read_file(LOCKSTEP_DOCS "/pipeline.md");
  for (const char* name : {"stages", "pipe", "listed", "devices"}) {
    const std::string program = documented(name);
    ASSERT_FALSE(program.empty()) << name;
    EXPECT_NE(docs.find("```cpp\n" + program + "```\n"), std::string::npos)
        << "docs/pipeline.md has not:\n"
        << program;
  }
}

TEST(PipelineDocs, RunOnTwoRanks) { ranks::expect_cells_pass(2, {"--documented"}); }

}  // namespace
}  // namespace lockstep::pipeline
