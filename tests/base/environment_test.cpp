#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>

#include "variables.h"

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using Settings = std::map<std::string, std::string>;

constexpr const char* kAll[] = {"RANK",
                                "WORLD_SIZE",
                                "LOCAL_RANK",
                                "LOCAL_WORLD_SIZE",
                                "GROUP_RANK",
                                "GROUP_WORLD_SIZE",
                                "MASTER_ADDR",
                                "MASTER_PORT",
                                "TORCHELASTIC_RESTART_COUNT",
                                "TORCHELASTIC_RUN_ID",
                                "LOCKSTEP_GENERATION",
                                "OMPI_COMM_WORLD_RANK",
                                "OMPI_COMM_WORLD_SIZE",
                                "OMPI_COMM_WORLD_LOCAL_RANK",
                                "OMPI_COMM_WORLD_LOCAL_SIZE",
                                "PMIX_NAMESPACE",
                                "SLURM_PROCID",
                                "SLURM_NTASKS",
                                "SLURM_LOCALID",
                                "SLURM_NODEID",
                                "SLURM_NNODES",
                                "SLURM_JOB_ID",
                                "SLURM_STEP_ID",
                                "SLURM_STEP_TASKS_PER_NODE",
                                "SLURM_TASKS_PER_NODE",
                                "LOCKSTEP_STORE",
                                "LOCKSTEP_SECRET_FILE",
                                "LOCKSTEP_SECRET_FD",
                                "LOCKSTEP_FLIGHT_DIR"};

// The launch environment of a process that has these variables and no others of any launcher.
LaunchEnvironment read_with(const Settings& settings) {
  Variables variables;
  for (const char* name : kAll) variables.unset(name);
  for (const auto& [name, value] : settings) variables.set(name, value);
  return read_launch_environment();
}

std::string error_with(Settings settings, const std::string& name, const std::string& value) {
  settings[name] = value;
  try {
    read_with(settings);
  } catch (const UsageError& error) {
    return error.what();
  }
  ADD_FAILURE() << name << "='" << value << "' was accepted";
  return {};
}

const Settings kTorchrun = {{"RANK", "5"},
                            {"WORLD_SIZE", "8"},
                            {"LOCAL_RANK", "1"},
                            {"LOCAL_WORLD_SIZE", "4"},
                            {"GROUP_RANK", "1"},
                            {"GROUP_WORLD_SIZE", "2"},
                            {"MASTER_ADDR", "host0"},
                            {"MASTER_PORT", "29500"},
                            {"TORCHELASTIC_RESTART_COUNT", "3"},
                            {"TORCHELASTIC_RUN_ID", "job-7"}};
const Settings kMpirun = {{"OMPI_COMM_WORLD_RANK", "3"},
                          {"OMPI_COMM_WORLD_SIZE", "4"},
                          {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                          {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                          {"PMIX_NAMESPACE", "prterun-1"}};
const Settings kSrun = {{"SLURM_PROCID", "3"},  {"SLURM_NTASKS", "4"},    {"SLURM_LOCALID", "1"},
                        {"SLURM_NODEID", "1"},  {"SLURM_NNODES", "2"},    {"SLURM_JOB_ID", "1234"},
                        {"SLURM_STEP_ID", "0"}, {"MASTER_ADDR", "node1"}, {"MASTER_PORT", "29500"}};

TEST(Variable, EmptyIsUnset) {
  Variables variables;
  variables.unset("LOCKSTEP_TEST");
  EXPECT_EQ(environment_variable("LOCKSTEP_TEST"), std::nullopt);
  variables.set("LOCKSTEP_TEST", "");
  EXPECT_EQ(environment_variable("LOCKSTEP_TEST"), std::nullopt);
  EXPECT_EQ(environment_integer("LOCKSTEP_TEST", 0, 9), std::nullopt);
  variables.set("LOCKSTEP_TEST", " x ");
  EXPECT_EQ(environment_variable("LOCKSTEP_TEST"), " x ");
}

TEST(Variable, IntegersAreWholeAndInRange) {
  Variables variables;
  for (const auto& [text, value] : std::map<std::string, long>{{"-3", -3}, {"0", 0}, {"12", 12}}) {
    variables.set("LOCKSTEP_TEST", text);
    EXPECT_EQ(environment_integer("LOCKSTEP_TEST", -3, 12), value);
  }
  for (const char* text :
       {"-4", "13", "1x", "x", " 1", "1 ", "1.0", "+1", "0x1", "99999999999999999999"}) {
    variables.set("LOCKSTEP_TEST", text);
    try {
      environment_integer("LOCKSTEP_TEST", -3, 12);
      ADD_FAILURE() << text;
    } catch (const UsageError& error) {
      EXPECT_EQ(std::string(error.what()),
                fmt::format("environment variable LOCKSTEP_TEST is '{}': it must be a whole number "
                            "from -3 to 12",
                            text));
    }
  }
}

TEST(LaunchEnvironment, NobodyLaunchedIt) {
  const auto env = read_with({});
  EXPECT_EQ(env.launcher, Launcher::none);
  EXPECT_EQ(env.rank, 0);
  EXPECT_EQ(env.world_size, 1);
  EXPECT_EQ(env.local_world_size, 1);
  EXPECT_EQ(env.run_id, "none");
  EXPECT_EQ(env.secret_fd, std::nullopt);
  EXPECT_EQ(env.master_addr, "");
}

TEST(LaunchEnvironment, Torchrun) {
  const auto env = read_with(kTorchrun);
  EXPECT_EQ(env.launcher, Launcher::torchrun);
  EXPECT_EQ(env.rank, 5);
  EXPECT_EQ(env.world_size, 8);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 4);
  EXPECT_EQ(env.node_rank, 1);
  EXPECT_EQ(env.num_nodes, 2);
  EXPECT_EQ(env.master_addr, "host0");
  EXPECT_EQ(env.master_port, 29500);
  EXPECT_EQ(env.restart_count, 3);
  EXPECT_EQ(env.generation, 3) << "torchrun has no other number for it";
  EXPECT_EQ(env.run_id, "job-7");
  EXPECT_EQ(env.store_endpoint, "");
}

TEST(LaunchEnvironment, AGenerationIsMoreThanRestarts) {
  auto settings = kTorchrun;
  settings["LOCKSTEP_GENERATION"] = "8";
  EXPECT_EQ(read_with(settings).generation, 8);
  EXPECT_EQ(read_with(settings).restart_count, 3);
}

TEST(LaunchEnvironment, TheLeastThatIsSetByHand) {
  const auto env = read_with(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1"}});
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_EQ(env.num_nodes, 1);
  // A single rank needs no address to meet at.
  EXPECT_EQ(read_with({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).master_addr, "");
}

TEST(LaunchEnvironment, LockstepRun) {
  auto settings = kTorchrun;
  settings["LOCKSTEP_STORE"] = "10.0.0.1:4000";
  settings["LOCKSTEP_SECRET_FD"] = "3";
  settings["LOCKSTEP_SECRET_FILE"] = "/run/secret";
  settings["LOCKSTEP_FLIGHT_DIR"] = "/tmp/flight";
  const auto env = read_with(settings);
  EXPECT_EQ(env.launcher, Launcher::lockstep);
  EXPECT_EQ(env.rank, 5);
  EXPECT_EQ(env.store_endpoint, "10.0.0.1:4000");
  EXPECT_EQ(env.secret_fd, 3);
  EXPECT_EQ(env.secret_file, "/run/secret");
  EXPECT_EQ(env.flight_directory, "/tmp/flight");
  EXPECT_THAT(error_with(settings, "LOCKSTEP_SECRET_FD", "three"), HasSubstr("LOCKSTEP_SECRET_FD"));
  settings.erase("RANK");
  EXPECT_THAT(error_with(settings, "WORLD_SIZE", "2"), HasSubstr("variable RANK is not set"));
}

TEST(LaunchEnvironment, Mpirun) {
  const auto env = read_with(kMpirun);
  EXPECT_EQ(env.launcher, Launcher::mpirun);
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_EQ(env.node_rank, 1);
  EXPECT_EQ(env.num_nodes, 2);
  EXPECT_EQ(env.run_id, "prterun-1");
}

TEST(LaunchEnvironment, Srun) {
  const auto env = read_with(kSrun);
  EXPECT_EQ(env.launcher, Launcher::srun);
  EXPECT_EQ(env.rank, 3);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_EQ(env.node_rank, 1);
  EXPECT_EQ(env.num_nodes, 2);
  EXPECT_EQ(env.run_id, "1234");
  EXPECT_EQ(env.master_addr, "node1");
}

TEST(LaunchEnvironment, SrunMayPlaceTasksUnevenly) {
  const auto tasks_on = [](int node, const char* list) {
    auto settings = kSrun;
    settings["SLURM_NTASKS"] = "15";
    settings["SLURM_NNODES"] = "4";
    settings["SLURM_LOCALID"] = "0";
    settings["SLURM_NODEID"] = std::to_string(node);
    settings["SLURM_STEP_TASKS_PER_NODE"] = list;
    settings["SLURM_TASKS_PER_NODE"] = "9";  // of the whole job, not of this step
    return read_with(settings).local_world_size;
  };
  EXPECT_EQ(tasks_on(0, "5(x2),3,2"), 5);
  EXPECT_EQ(tasks_on(1, "5(x2),3,2"), 5);
  EXPECT_EQ(tasks_on(2, "5(x2),3,2"), 3);
  EXPECT_EQ(tasks_on(3, "5(x2),3,2"), 2);
  EXPECT_EQ(tasks_on(3, "4(x10)"), 4);
  for (const char* list : {"5", "5,", "5(x2", "5(x2),", "5(x)", "x", "0(x4)", "5(x2)3(x2)",
                           "-1(x9)", "5(x99999999999)", "5(y2),5(x9)"}) {
    auto settings = kSrun;
    settings["SLURM_NODEID"] = "3";
    EXPECT_THAT(error_with(settings, "SLURM_STEP_TASKS_PER_NODE", list),
                HasSubstr(fmt::format("SLURM_STEP_TASKS_PER_NODE is '{}'", list)));
  }
  EXPECT_EQ(read_with(kSrun).local_world_size, 2);
}

TEST(LaunchEnvironment, ABatchScriptIsNoStep) {
  // sbatch sets SLURM_PROCID for the script itself; only srun's steps are ranks.
  auto settings = kSrun;
  settings.erase("SLURM_STEP_ID");
  EXPECT_EQ(read_with(settings).launcher, Launcher::none);
}

TEST(LaunchEnvironment, TheInnermostLauncherWins) {
  auto settings = kSrun;
  settings.insert(kMpirun.begin(), kMpirun.end());
  EXPECT_EQ(read_with(settings).launcher, Launcher::mpirun);
  for (const auto& [name, value] : kTorchrun) settings[name] = value;
  EXPECT_EQ(read_with(settings).launcher, Launcher::torchrun);
}

TEST(LaunchEnvironment, EveryBadNumberIsNamed) {
  for (const auto& [settings, names] :
       {std::pair{kTorchrun,
                  std::vector<std::string>{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                           "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT",
                                           "TORCHELASTIC_RESTART_COUNT", "LOCKSTEP_GENERATION"}},
        std::pair{kMpirun, std::vector<std::string>{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                                    "OMPI_COMM_WORLD_LOCAL_RANK",
                                                    "OMPI_COMM_WORLD_LOCAL_SIZE"}},
        std::pair{kSrun, std::vector<std::string>{"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
                                                  "SLURM_NODEID", "SLURM_NNODES"}}}) {
    for (const std::string& name : names)
      for (const char* value : {"abc", "-1", "1.5", "99999999999"})
        EXPECT_THAT(error_with(settings, name, value),
                    HasSubstr(fmt::format("variable {} is '{}'", name, value)));
  }
  EXPECT_THAT(error_with(kTorchrun, "WORLD_SIZE", "0"), HasSubstr("variable WORLD_SIZE is '0'"));
  EXPECT_THAT(error_with(kTorchrun, "MASTER_PORT", "65536"), HasSubstr("MASTER_PORT"));
  EXPECT_THAT(error_with(kTorchrun, "LOCAL_WORLD_SIZE", "0"), HasSubstr("LOCAL_WORLD_SIZE"));
}

TEST(LaunchEnvironment, EveryMissingVariableIsNamed) {
  for (const auto& [settings, names] :
       {std::pair{kTorchrun,
                  std::vector<std::string>{"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}},
        std::pair{kMpirun,
                  std::vector<std::string>{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                                           "OMPI_COMM_WORLD_LOCAL_SIZE"}},
        std::pair{kSrun, std::vector<std::string>{"SLURM_NTASKS", "SLURM_LOCALID", "MASTER_ADDR",
                                                  "MASTER_PORT"}}}) {
    for (const std::string& name : names)
      EXPECT_THAT(error_with(settings, name, ""), HasSubstr(name));
  }
}

TEST(LaunchEnvironment, ContradictionsAreNamed) {
  EXPECT_THAT(error_with(kTorchrun, "RANK", "8"), HasSubstr("RANK says rank 8"));
  EXPECT_THAT(error_with(kTorchrun, "LOCAL_RANK", "4"), HasSubstr("LOCAL_RANK"));
  EXPECT_THAT(error_with(kMpirun, "OMPI_COMM_WORLD_RANK", "4"),
              HasSubstr("OMPI_COMM_WORLD_RANK says rank 4"));
  EXPECT_THAT(error_with(kMpirun, "OMPI_COMM_WORLD_LOCAL_RANK", "2"),
              HasSubstr("OMPI_COMM_WORLD_LOCAL_RANK"));
  EXPECT_THAT(error_with(kSrun, "SLURM_PROCID", "4"), HasSubstr("SLURM_PROCID says rank 4"));
  EXPECT_THAT(error_with(kSrun, "SLURM_LOCALID", "2"), HasSubstr("SLURM_LOCALID"));
}

TEST(LaunchEnvironment, EveryLauncherHasAName) {
  EXPECT_STREQ(launcher_name(Launcher::none), "no launcher");
  EXPECT_STREQ(launcher_name(Launcher::lockstep), "lockstep run");
  EXPECT_STREQ(launcher_name(Launcher::torchrun), "torchrun");
  EXPECT_STREQ(launcher_name(Launcher::mpirun), "mpirun");
  EXPECT_STREQ(launcher_name(Launcher::srun), "srun");
}

}  // namespace
}  // namespace lockstep
