// Each fault of mutants.json fits the current tree. Finding it takes a compiler: see the long test
// mutants_found, or ./dev mutants.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace lockstep::mutants {
namespace {

const std::filesystem::path kRoot = LOCKSTEP_SOURCE_DIR;

std::string text_of(const std::filesystem::path& file) {
  std::ifstream stream(file);
  return {std::istreambuf_iterator<char>(stream), {}};
}

int times_in(const std::string& text, const std::string& piece) {
  int times = 0;
  for (auto at = text.find(piece); at != std::string::npos; at = text.find(piece, at + 1)) ++times;
  return times;
}

nlohmann::json all_mutants() {
  return nlohmann::json::parse(text_of(kRoot / "tests/mutants/mutants.json"));
}

// The linker takes the file with the fault in place of a library's. That works for source files
// only, because many of those include a header.
TEST(Mutants, EachOneFitsTheFileThatItIsFor) {
  for (const auto& mutant : all_mutants()) {
    const auto name = mutant.at("name").get<std::string>();
    const auto file = mutant.at("file").get<std::string>();
    EXPECT_TRUE(file.starts_with("lockstep/") && file.ends_with(".cpp")) << name << ": " << file;
    EXPECT_EQ(times_in(text_of(kRoot / file), mutant.at("text")), 1)
        << name << ": its text must be once in " << file;
    EXPECT_NE(mutant.at("text"), mutant.at("instead")) << name;
    EXPECT_NE(mutant.contains("cells"), mutant.contains("test")) << name << ": what is to find it?";
  }
}

TEST(Mutants, NamesAreDifferent) {
  std::set<std::string> names;
  for (const auto& mutant : all_mutants())
    EXPECT_TRUE(names.insert(mutant.at("name")).second) << mutant.at("name");
}

TEST(Mutants, AreThereForEachWayToSpreadAModel) {
  const auto all = all_mutants();
  EXPECT_GE(all.size(), 15U);
  std::set<std::string> folders;
  for (const auto& mutant : all)
    folders.insert(std::filesystem::path(mutant.at("file").get<std::string>()).parent_path());
  for (const char* folder :
       {"lockstep/nn/tensor_parallel", "lockstep/nn/context_parallel", "lockstep/models/gpt2",
        "lockstep/parallel/data_parallel", "lockstep/parallel/replicate", "lockstep/parallel/shard",
        "lockstep/parallel/pipeline", "lockstep/distributed", "lockstep/train"})
    EXPECT_TRUE(folders.contains(folder)) << folder;
}

}  // namespace
}  // namespace lockstep::mutants
