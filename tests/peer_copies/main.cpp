// The test program. With an argument of tables.h it is one rank of a job.
#include <string>

#include <gtest/gtest.h>

#include <lockstep/comm/world/join.h>

#include "tables.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  const std::string what = argc > 1 ? argv[1] : "";
  const std::string argument = argc > 2 ? argv[2] : "";
  if (what == "--copies")
    return ranks::run_cells(
        comm::join_world({.backend = argument, .timeout = milliseconds(60'000)}),
        peer_copies::check_copies, argc > 3 ? argv[3] : "");
  if (what == "--lost-copying") return ranks::run_cells(peer_copies::lose_while_copying);
  if (what == "--layouts")
    return ranks::run_cells(
        [&](ranks::Cells& cells) { peer_copies::check_layouts(cells, argument); });
  if (what == "--lost-sending")
    return ranks::run_cells(
        [&](ranks::Cells& cells) { peer_copies::lose_while_sending(cells, std::stoi(argument)); });
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
