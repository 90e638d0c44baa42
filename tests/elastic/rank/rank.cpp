// A rank that joins its job's store, counts itself there, waits for all the others and says what
// it knows.
#include <cstdio>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/net/secret.h>
#include <lockstep/store/client.h>

int main() {
  using namespace lockstep;
  try {
    const LaunchEnvironment env = read_launch_environment();
    const Deadline deadline = Deadline::after(milliseconds(20'000));
    store::Client store(net::Address::parse(env.store_endpoint, 0, "LOCKSTEP_STORE"),
                        net::Secret::from_descriptor(env.secret_fd.value()), deadline);
    if (store.add("arrived", 1, deadline) == env.world_size) store.set("all", "here", deadline);
    store.wait({"all"}, deadline);
    fmt::print("launcher={} rank={} world={} local={}/{} node={}/{} flight={}\n",
               launcher_name(env.launcher), env.rank, env.world_size, env.local_rank,
               env.local_world_size, env.node_rank, env.num_nodes,
               env.flight_directory.empty() ? "no" : "yes");
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
