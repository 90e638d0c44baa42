// A process's surroundings. Environment variables are read and set here and nowhere else.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

// A variable's value; nothing where it is unset or empty.
std::optional<std::string> environment_variable(const char* name);

// A variable's value, which may be empty; nothing only where it is unset.
std::optional<std::string> environment_variable_or_empty(const char* name);

// A variable's value as a whole number in [lowest, highest]. Throws a UsageError that names the
// variable and its value where it is anything else.
std::optional<long> environment_integer(const char* name, long lowest, long highest);

// The folder for temporary files: TMPDIR, or else /tmp. Throws a UsageError that names the variable
// where this is not a folder that the process can write to.
std::string temporary_directory();

// Every variable as "NAME=value", for passing on to a child.
std::vector<std::string> whole_environment();

// Sets a variable that nobody has set, for libraries that read it.
void set_environment_default(const char* name, const char* value);

// Sets a variable; an empty value unsets it. No other thread may read the environment meanwhile.
void set_environment(const char* name, const char* value);

// The program that started this process as a rank.
enum class Launcher { none, lockstep, torchrun, mpirun, srun };

const char* launcher_name(Launcher launcher);

// Everything that a rank learns from its launcher.
struct LaunchEnvironment {
  Launcher launcher = Launcher::none;
  // Started by lockstep run to stand by until a rank is lost: it has no rank yet (launcher_line.h).
  bool spare = false;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  int node_rank = 0;
  int num_nodes = 1;
  std::string master_addr;  // empty where the launcher gives none
  int master_port = 0;      // 0 likewise
  int restart_count = 0;    // how often the launcher has restarted this job
  int max_restarts = 0;     // how often it would
  // Counts how often the job was formed anew, by restarts and by nodes that joined. Processes of
  // different generations cannot talk to each other.
  int generation = 0;
  std::string run_id;  // one job's name; "none" where the launcher gives none
  // The job's secret (lockstep run): an inherited descriptor, or a file with mode 0600.
  std::optional<int> secret_fd;
  std::string secret_file;
  // Where lockstep run's store listens, "host:port"; empty under other launchers.
  std::string store_endpoint;
  // Where lockstep run reads how far its ranks have come: an inherited descriptor.
  std::optional<int> progress_fd;
  // Where flight recorder dumps go; empty where nobody asked for them.
  std::string flight_directory;
};

// Reads the variables of lockstep run, torchrun (also set by hand), mpirun (Open MPI) or srun, in
// that order. A process that nobody launched is rank 0 of 1. A set of variables that is incomplete
// or contradicts itself is a UsageError that names the variable.
LaunchEnvironment read_launch_environment();

// A text that names the host, its boot and its network: processes with equal ones can share memory
// and reach each other's abstract sockets.
std::string host_identity();

}  // namespace lockstep
