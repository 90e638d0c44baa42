// What a launcher says of itself when it comes to another.
#pragma once

#include <string>

namespace lockstep::elastic {

struct Introduction {
  int node_rank = -1;  // that it claims; -1: whichever is free
  int min_nodes = 1;
  int max_nodes = 1;
  int num_ranks = 1;
  std::string host;  // its name in messages
  std::string run_id;
  std::string address;  // "host:port" where it can be reached itself
  // Of the generation that it was part of last; -1: it comes for the first time.
  int last_generation = -1;
  int last_node_rank = -1;
  int last_restarts = 0;  // used up by then
  bool ready = true;      // none of its ranks is left

  std::string encode() const;

  // UsageError where the text is something else.
  static Introduction decode(const std::string& text);
};

// "3", or "2:4"
std::string node_range(int min_nodes, int max_nodes);

}  // namespace lockstep::elastic
