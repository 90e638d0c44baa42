#include <lockstep/elastic/layout.h>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>

namespace lockstep::elastic {

using Json = nlohmann::json;

namespace {

constexpr std::int64_t kMostRanks = 1 << 24;

}  // namespace

std::string Layout::encode() const {
  Json list = Json::array();
  for (const Node& node : nodes)
    list.push_back({{"host", node.host}, {"num_ranks", node.num_ranks}, {"address", node.address}});
  const Json json = {{"nodes", list},
                     {"node_rank", node_rank},
                     {"master_addr", master_addr},
                     {"master_port", master_port},
                     {"store", store},
                     {"generation", generation},
                     {"num_restarts", num_restarts},
                     {"max_restarts", max_restarts}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Layout Layout::decode(const std::string& text) {
  const auto corrupted = [](const std::string& what) {
    return CommError(
        {.fault = Fault::corrupted,
         .operation = "meeting of the launchers",
         .explanation =
             fmt::format("Node 0 sent a layout in a form this launcher does not know ({}): use the "
                         "same version of lockstep on every host.",
                         what)});
  };
  Layout layout;
  std::int64_t world_size = 0;
  try {
    const Json json = Json::parse(text);
    for (const Json& node : json.at("nodes")) {
      layout.nodes.push_back({node.at("host"), node.at("num_ranks"), node.at("address")});
      world_size += layout.nodes.back().num_ranks;
      if (layout.nodes.back().num_ranks < 1 || world_size > kMostRanks)
        throw corrupted("a node's number of ranks makes no sense");
    }
    layout.node_rank = json.at("node_rank");
    layout.master_addr = json.at("master_addr");
    layout.master_port = json.at("master_port");
    layout.store = json.at("store");
    layout.generation = json.at("generation");
    layout.num_restarts = json.at("num_restarts");
    layout.max_restarts = json.at("max_restarts");
  } catch (const Json::exception& error) {
    throw corrupted(error.what());
  }
  if (layout.node_rank < 0 || layout.node_rank >= layout.num_nodes())
    throw corrupted("no such node in it");
  return layout;
}

}  // namespace lockstep::elastic
