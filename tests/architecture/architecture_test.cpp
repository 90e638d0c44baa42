// The tree keeps the rules of ARCHITECTURE.md, and each rule catches its violation.
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "rules.h"

namespace lockstep::architecture {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

TEST(Architecture, TheTreeKeepsToItsTable) {
  for (const std::string& violation : violations(LOCKSTEP_SOURCE_DIR)) ADD_FAILURE() << violation;
}

// A small tree that keeps the rules; each test breaks one of them.
class Rules : public testing::Test {
 protected:
  Rules() {
    std::string name = (fs::temp_directory_path() / "architecture_test_XXXXXX").string();
    root_ = ::mkdtemp(name.data());
    write_table("| `base` | the ground | | no |\n"
                "| `comm/types` | vocabulary | base | no |\n"
                "| `comm` | collectives | base, comm/types | yes |\n"
                "| `cli` | the program | base | no |\n");
    write_targets();
    write("lockstep/base/environment.cpp", "auto home() { return std::getenv(\"HOME\"); }\n");
    write("lockstep/base/error.h", "#include <string>\n");
    write("lockstep/comm/types/call.h", "#include <lockstep/base/error.h>\n");
    write("lockstep/comm/types/words.h", "#include <lockstep/comm/types/call.h>\n");
    write("lockstep/comm/tcp/link.h",
          "#include <ATen/core/Tensor.h>\n#include <lockstep/comm/types/words.h>\n");
    write("cli/main.cpp", "#include <lockstep/base/error.h>\n#include \"verbs.h\"\n");
  }
  ~Rules() override { fs::remove_all(root_); }

  void write(const fs::path& file, const std::string& text) {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text;
  }

  void write_table(const std::string& rows) {
    write("ARCHITECTURE.md",
          "| part | what it is for | may include | LibTorch |\n|---|---|---|---|\n" + rows +
              "\n| another | table |\n");
  }

  // The targets of the table above, and further ones.
  void write_targets(const std::string& further = "") {
    write("lockstep/CMakeLists.txt", "# lockstep_part(a comment)\n"
                                     "lockstep_part(base LOOPS)\n"
                                     "lockstep_part(comm_types USES base)\n"
                                     "lockstep_part(comm USES base\n  comm_types LIBTORCH)\n"
                                     "lockstep_part(all USES comm LIBTORCH)\n" +
                                         further);
  }

  fs::path root_;
};

TEST_F(Rules, ATreeThatKeepsToItsTablePasses) { EXPECT_THAT(violations(root_), IsEmpty()); }

TEST_F(Rules, AnArrowThatTheTableDoesNotHave) {
  write("lockstep/base/error.h", "#pragma once\n  # include <lockstep/comm/types/call.h>\n");
  EXPECT_THAT(violations(root_), ElementsAre(AllOf(StartsWith("lockstep/base/error.h:2: "),
                                                   HasSubstr("base may not include comm/types"))));
}

TEST_F(Rules, APartWithinAFolderMayNotIncludeTheRestOfIt) {
  write("lockstep/comm/types/words.h", "#include \"lockstep/comm/tcp/link.h\"\n");
  EXPECT_THAT(violations(root_), ElementsAre(HasSubstr("comm/types may not include comm ")));
}

TEST_F(Rules, AFolderThatHoldsPartsNeedsNoRowOfItsOwn) {
  write_table("| `base` | the ground | | no |\n"
              "| `comm/types` | vocabulary | base | no |\n"
              "| `comm` | collectives | base, comm/types | yes |\n"
              "| `parallel/shard` | a strategy | base | no |\n"
              "| `cli` | the program | base | no |\n");
  write_targets("lockstep_part(shard USES base)\n");
  write("lockstep/parallel/shard/unit.h", "#include <lockstep/base/error.h>\n");
  EXPECT_THAT(violations(root_), IsEmpty());
  write("lockstep/parallel/pipe/stage.h", "");
  EXPECT_THAT(violations(root_),
              ElementsAre(HasSubstr("parallel/pipe/stage.h: no row of ARCHITECTURE.md holds")));
}

TEST_F(Rules, ARowMayStandForAFolderInEachOfSeveral) {
  write_table("| `base` | the ground | | no |\n"
              "| `comm/types` | vocabulary | base | no |\n"
              "| `comm/*/plain` | numbers of each backend | base | no |\n"
              "| `comm` | collectives | base, comm/types, comm/*/plain | yes |\n"
              "| `cli` | the program | base, comm/*/plain | no |\n");
  write_targets("lockstep_part(comm_plain USES base)\n");
  EXPECT_THAT(violations(root_),
              ElementsAre(HasSubstr("a row for comm/*/plain, which is no folder")));
  write("lockstep/comm/tcp/plain/options.h", "#include <lockstep/base/error.h>\n");
  write("lockstep/comm/shm/plain/options.h", "#include <lockstep/comm/tcp/plain/options.h>\n");
  write("cli/main.cpp", "#include <lockstep/comm/shm/plain/options.h>\n");
  EXPECT_THAT(violations(root_), IsEmpty());
  write("lockstep/comm/shm/plain/options.h", "#include <ATen/ATen.h>\n");
  EXPECT_THAT(violations(root_), ElementsAre(HasSubstr("has no LibTorch, but includes ATen")));
  write("lockstep/comm/shm/plain/options.h", "#include <lockstep/comm/tcp/link.h>\n");
  EXPECT_THAT(violations(root_), ElementsAre(HasSubstr("comm/*/plain may not include comm ")));
}

TEST_F(Rules, AnArrowOfTheProgram) {
  write("cli/main.cpp", "#include <lockstep/comm/tcp/link.h>\n");
  EXPECT_THAT(violations(root_), ElementsAre(HasSubstr("cli may not include comm ")));
}

TEST_F(Rules, APartOfTheProgramMayHaveARowOfItsOwn) {
  write_table("| `base` | the ground | | no |\n"
              "| `comm/types` | vocabulary | base | no |\n"
              "| `comm` | collectives | base, comm/types | yes |\n"
              "| `cli` | the program | base | no |\n"
              "| `cli/torch` | the one with LibTorch | base, comm, cli | yes |\n");
  write("cli/torch/main.cpp", "#include <cli/verbs.h>\n#include <lockstep/comm/tcp/link.h>\n");
  EXPECT_THAT(violations(root_), IsEmpty());
  write("cli/main.cpp", "#include <cli/torch/bench.h>\n");
  EXPECT_THAT(violations(root_), ElementsAre(HasSubstr("cli may not include cli/torch")));
}

TEST_F(Rules, TheUmbrellaIsForProgramsOutside) {
  write("lockstep/lockstep.h", "#include <lockstep/comm/tcp/link.h>\n");
  EXPECT_THAT(violations(root_), IsEmpty());
  write("cli/main.cpp", "#include <lockstep/lockstep.h>\n");
  EXPECT_THAT(violations(root_),
              ElementsAre(HasSubstr("cli/main.cpp:1: includes lockstep/lockstep.h")));
}

TEST_F(Rules, ARelativeIncludeWouldHideAnArrow) {
  write("lockstep/base/error.h", "#include \"../comm/types/call.h\"\n");
  EXPECT_THAT(violations(root_), ElementsAre(HasSubstr("write it as <lockstep/")));
}

TEST_F(Rules, LibTorchWhereTheTableSaysNo) {
  for (const char* header :
       {"ATen/ATen.h", "c10/util/Half.h", "torch/torch.h", "caffe2/core/a.h"}) {
    write("lockstep/comm/types/call.h", std::string("#include <") + header + ">\n");
    EXPECT_THAT(violations(root_), ElementsAre(AllOf(StartsWith("lockstep/comm/types/call.h:1: "),
                                                     HasSubstr(header))));
  }
}

TEST_F(Rules, AFolderWithoutARow) {
  fs::create_directories(root_ / "lockstep/mesh");
  EXPECT_THAT(violations(root_), ElementsAre(HasSubstr("lockstep/mesh: this folder has no row")));
}

TEST_F(Rules, ARowWithoutAFolder) {
  fs::remove_all(root_ / "lockstep/comm/types");
  write("lockstep/comm/tcp/link.h", "");
  EXPECT_THAT(violations(root_), ElementsAre(HasSubstr("a row for comm/types")));
}

TEST_F(Rules, ARowForAFile) {
  fs::remove_all(root_ / "lockstep/comm/types");
  write("lockstep/comm/tcp/link.h", "");
  write("lockstep/comm/types.h", "#include <lockstep/base/error.h>\n");
  EXPECT_THAT(violations(root_),
              ElementsAre(HasSubstr("a row for comm/types, which is no folder of lockstep/")));
}

TEST_F(Rules, ARowForSeveralFolders) {
  write_table("| `base` | the ground | | no |\n"
              "| `comm/types`, `comm/words` | vocabulary | base | no |\n"
              "| `comm` | collectives | base, comm/types | yes |\n"
              "| `cli` | the program | base | no |\n");
  write("lockstep/comm/words/names.h", "");
  EXPECT_THAT(
      violations(root_),
      ElementsAre(HasSubstr("the row of comm/types names comm/words too: a part is one folder")));
}

TEST_F(Rules, ARowMayHoldAFolderOfEachOther) {
  write_table("| `base` | the ground | | no |\n"
              "| `comm/types`, `comm/*/spec` | vocabulary | base | no |\n"
              "| `comm` | collectives | base, comm/types | yes |\n"
              "| `cli` | the program | base | no |\n");
  EXPECT_THAT(violations(root_), ElementsAre(HasSubstr("a row for comm/*/spec")));
  write("lockstep/comm/tcp/spec/size.h", "#include <lockstep/comm/types/call.h>\n");
  EXPECT_THAT(violations(root_), IsEmpty());
  write("lockstep/comm/tcp/spec/size.h", "#include <lockstep/comm/tcp/link.h>\n");
  EXPECT_THAT(violations(root_), ElementsAre(HasSubstr("comm/types may not include comm ")));
}

TEST_F(Rules, AnArrowOfAKernelsHeader) {
  write("lockstep/base/packs.cuh", "#include <lockstep/comm/types/call.h>\n");
  EXPECT_THAT(violations(root_), ElementsAre(AllOf(StartsWith("lockstep/base/packs.cuh:1: "),
                                                   HasSubstr("base may not include comm/types"))));
}

TEST_F(Rules, APartIsATarget) {
  write("lockstep/CMakeLists.txt", "lockstep_part(base)\nlockstep_part(types USES base)\n"
                                   "lockstep_part(comm USES base LIBTORCH)\n");
  EXPECT_THAT(violations(root_),
              ElementsAre(HasSubstr("the row of comm/types stands for the target comm_types, which "
                                    "0 calls"),
                          HasSubstr("lockstep/CMakeLists.txt: the target types has no row")));
  write_targets("lockstep_part(comm_types)\n");
  EXPECT_THAT(violations(root_), ElementsAre(HasSubstr("which 2 calls of lockstep_part() make")));
}

TEST_F(Rules, ATargetHasTheArrowsOfItsRow) {
  write("lockstep/CMakeLists.txt", "lockstep_part(base USES comm_types)\n"
                                   "lockstep_part(comm_types USES base LIBTORCH)\n"
                                   "lockstep_part(comm USES comm_types)\n");
  EXPECT_THAT(violations(root_),
              ElementsAre(HasSubstr("the target base uses comm_types, which its row may not"),
                          HasSubstr("the target comm_types has LibTorch, and its row says no"),
                          HasSubstr("the target comm has no LibTorch, and its row says yes")));
}

TEST_F(Rules, AFolderIsANamespace) {
  write("lockstep/comm/tcp/link.h", "namespace lockstep::base {\nclass Error;\n}\n\n"
                                    "namespace lockstep::comm::tcp {\nclass Link {\n};\n"
                                    "}  // namespace lockstep::comm::tcp\n\n"
                                    "namespace lockstep::names {\nusing comm::tcp::Link;\n"
                                    "}  // namespace lockstep::names\n");
  write("lockstep/base/error.h",
        "namespace lockstep {\nnamespace internal {\nint f();\n"
        "}  // namespace internal\n\nint g();\n}  // namespace lockstep\n");
  EXPECT_THAT(violations(root_), IsEmpty());
  write("lockstep/comm/types/call.h",
        "namespace lockstep {\nnamespace {\nint f() {\n  return 1;\n}\n}  // namespace\n"
        "}  // namespace lockstep\n");
  write("cli/main.cpp", "namespace lockstep::comm {\nint f();\n}  // namespace lockstep::comm\n");
  EXPECT_THAT(violations(root_),
              ElementsAre(AllOf(StartsWith("lockstep/comm/types/call.h:3: "),
                                HasSubstr("in lockstep, and the namespace of this folder is "
                                          "lockstep::comm")),
                          AllOf(StartsWith("cli/main.cpp:2: "), HasSubstr("lockstep::cli"))));
}

TEST_F(Rules, AnEnvironmentVariableReadElsewhere) {
  write("cli/main.cpp", "const char* home = ::getenv(\"HOME\");\n");
  EXPECT_THAT(violations(root_), ElementsAre(StartsWith("cli/main.cpp:1: reads an environment")));
}

TEST_F(Rules, NamesThatSayNothing) {
  for (const char* file : {"lockstep/base/utils.h", "lockstep/comm/tcp_helpers.cpp",
                           "tests/misc/test.cpp", "bench/common.h"}) {
    write(file, "");
    EXPECT_THAT(violations(root_), ElementsAre(StartsWith(file))) << file;
    fs::remove(root_ / file);
    if (std::string(file).starts_with("tests")) fs::remove_all(root_ / "tests");
  }
}

TEST_F(Rules, ATableThatCannotBeRead) {
  write_table("| `base` | the ground | | maybe |\n");
  EXPECT_THAT(violations(root_), testing::Contains(HasSubstr("yes or no")));
  write_table("");
  EXPECT_THAT(violations(root_), testing::Contains(HasSubstr("has no table of parts")));
}

TEST_F(Rules, ARowMayNameOnlyRowsAboveIt) {
  write_table("| `base` | the ground | comm | no |\n"
              "| `comm` | collectives | base | yes |\n"
              "| `cli` | the program | base, comm | no |\n");
  write("lockstep/CMakeLists.txt", "lockstep_part(base)\nlockstep_part(comm USES base LIBTORCH)\n");
  EXPECT_THAT(violations(root_),
              ElementsAre(HasSubstr("base may include comm, which has no row above it"),
                          HasSubstr("cli says no LibTorch, but it may include comm")));
}

}  // namespace
}  // namespace lockstep::architecture
