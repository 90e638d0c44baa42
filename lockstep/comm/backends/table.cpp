#include <lockstep/comm/backends/table.h>

#include <mutex>

#include <lockstep/base/error.h>

namespace lockstep::comm::backends {

namespace {

// `auto` takes the first row that fits, so better rows come first.
std::vector<Capabilities> rows_of_lockstep() {
  return {
      {.name = "shm+tcp",
       .title = "shm and tcp",
       .tensors = Tensors::on_any_device,
       .sums = Sums::canonical,
       .inside_a_host = "shm",
       .between_hosts = "tcp"},
      {.name = "shm",
       .title = "shm",
       .tensors = Tensors::on_any_device,
       .sums = Sums::canonical,
       .inside_a_host = "shm"},
      {.name = "tcp",
       .title = "tcp",
       .tensors = Tensors::on_any_device,
       .sums = Sums::canonical,
       .inside_a_host = "tcp",
       .between_hosts = "tcp"},
      {.name = "gloo",
       .title = "Gloo",
       .inside_a_host = "gloo",
       .between_hosts = "gloo",
       .needs_to_build =
           "a LibTorch with c10d's Gloo and Gloo's headers (Debian: libtorch-dev and libgloo-dev)"},
      {.name = "mpi",
       .title = "MPI",
       .inside_a_host = "mpi",
       .between_hosts = "mpi",
       .started_by = StartedBy::mpirun,
       .through_dev_shm = true,
       .needs_to_build = "Open MPI with its headers (Debian: libopenmpi-dev and openmpi-bin)"},
      {.name = "nccl",
       .title = "NCCL",
       .makes = Makes::lanes,
       .tensors = Tensors::on_cuda,
       .inside_a_host = "nccl",
       .between_hosts = "nccl",
       .through_dev_shm = true,
       .needs_to_build = "a LibTorch built for CUDA, and nccl.h (give LibTorch's CMake folder as "
                         "Torch_DIR)",
       .needs_to_run = "NCCL 2.19 or newer"},
  };
}

// Programs add rows to it: one of the few objects that a process has once.
struct Table {
  std::mutex mutex;
  std::vector<Capabilities> rows = rows_of_lockstep();
};

Table& the_table() {
  static Table only;
  return only;
}

}  // namespace

std::vector<Capabilities> table() {
  Table& all = the_table();
  const std::lock_guard lock(all.mutex);
  return all.rows;
}

std::optional<Capabilities> find(std::string_view name) {
  for (Capabilities& row : table())
    if (row.name == name) return std::move(row);
  return std::nullopt;
}

bool is_started_by_mpirun(std::string_view name) {
  const auto row = find(name);
  return row && row->started_by == StartedBy::mpirun;
}

std::vector<std::string> names() {
  std::vector<std::string> names{std::string(kAutomatic)};
  for (Capabilities& row : table()) names.push_back(std::move(row.name));
  return names;
}

void add(Capabilities row) {
  Table& all = the_table();
  const std::lock_guard lock(all.mutex);
  if (row.name.empty()) throw UsageError("a backend needs a name: give one in its Capabilities");
  bool taken = row.name == kAutomatic;
  for (const Capabilities& other : all.rows) taken = taken || other.name == row.name;
  if (taken) throw UsageError("there is a backend '{}' already: give yours another name", row.name);
  all.rows.push_back(std::move(row));
}

}  // namespace lockstep::comm::backends
