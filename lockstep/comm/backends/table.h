// The capabilities of each backend. Code that has to know them asks this table and compares no
// names: the reader of configs, which has no LibTorch; join_world(), which also chooses for `auto`;
// lockstep check and lockstep bench. comm/world/backends.h says how each backend is made.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::comm::backends {

enum class Makes : std::uint8_t {
  communicators,  // it carries all calls of a group
  lanes,  // it carries the tensors on GPUs; a communicator of ours beside it carries the rest
};

// The devices on which the tensors of a backend's calls may be.
enum class Tensors : std::uint8_t {
  on_host,
  on_any_device,  // tensors on a device are copied to the host's memory and back
  on_cuda,
};

// The order in which a backend adds.
enum class Sums : std::uint8_t {
  canonical,  // the order of algorithms/reduction.h: the same bits in every layout
  its_own,    // within rounding of the canonical order
};

// When a ledger compares the ranks' calls of a third-party engine (comm/backends/engine/ledger.h).
enum class LedgerMode : std::uint8_t {
  automatic,  // what the engine needs: `before` for Gloo, `beside` for MPI
  before,     // a rank takes part in a call only after comparing it: no wrong number is ever made,
              // at the price of one round to the store
  beside,     // in the background: costs the call nothing; a mismatch is found some milliseconds
              // later and thrown by this call's Work or by a later call
};

// The launcher that has to have started its ranks.
enum class StartedBy : std::uint8_t { any_launcher, mpirun };

struct Capabilities {
  std::string name;   // the name in a config
  std::string title;  // the name in sentences, such as errors
  Makes makes = Makes::communicators;
  Tensors tensors = Tensors::on_host;
  Sums sums = Sums::its_own;
  // The links that carry a message between two ranks of one host, and between two hosts; empty if
  // it cannot go there.
  std::string inside_a_host;
  std::string between_hosts;
  StartedBy started_by = StartedBy::any_launcher;
  // Whether messages pass through files in /dev/shm, which is small in containers.
  bool through_dev_shm = false;
  // A build of Lockstep needs this to contain the backend, and the text says how to install it;
  // empty if every build contains it.
  std::string needs_to_build = "";
  // A rank has to find this when its job starts; empty if it needs nothing more.
  std::string needs_to_run = "";

  // Whether its two links belong to other backends, where they can be tried one by one.
  bool joins_two_links() const { return !between_hosts.empty() && inside_a_host != between_hosts; }
};

// The name that lets join_world() choose from the table.
inline constexpr std::string_view kAutomatic = "auto";

// All rows: first Lockstep's, whether or not this build has those backends, then the rows that the
// program added.
std::vector<Capabilities> table();
// The row of that name, if it exists.
std::optional<Capabilities> find(std::string_view name);
// Whether the ranks of this backend have to be started by mpirun.
bool is_started_by_mpirun(std::string_view name);
// kAutomatic, then the names of all rows.
std::vector<std::string> names();

// Adds a row for the life of the process. UsageError for a name that is taken, empty, or
// kAutomatic. Any thread may call it.
void add(Capabilities row);

}  // namespace lockstep::comm::backends
