#include <lockstep/elastic/introduction.h>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>

namespace lockstep::elastic {

using Json = nlohmann::json;

std::string Introduction::encode() const {
  const Json json = {{"node_rank", node_rank},
                     {"min_nodes", min_nodes},
                     {"max_nodes", max_nodes},
                     {"num_ranks", num_ranks},
                     {"host", host},
                     {"run_id", run_id},
                     {"address", address},
                     {"last_generation", last_generation},
                     {"last_node_rank", last_node_rank},
                     {"last_restarts", last_restarts},
                     {"ready", ready}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Introduction Introduction::decode(const std::string& text) {
  try {
    const Json json = Json::parse(text);
    return {.node_rank = json.at("node_rank"),
            .min_nodes = json.at("min_nodes"),
            .max_nodes = json.at("max_nodes"),
            .num_ranks = json.at("num_ranks"),
            .host = json.at("host"),
            .run_id = json.at("run_id"),
            .address = json.at("address"),
            .last_generation = json.at("last_generation"),
            .last_node_rank = json.at("last_node_rank"),
            .last_restarts = json.at("last_restarts"),
            .ready = json.at("ready")};
  } catch (const Json::exception& error) {
    throw UsageError("a launcher introduced itself in a form this one does not know ({}): use the "
                     "same version of lockstep on every host",
                     error.what());
  }
}

std::string node_range(int min_nodes, int max_nodes) {
  const std::string most = std::to_string(max_nodes);
  return min_nodes == max_nodes ? most : std::to_string(min_nodes) + ":" + most;
}

}  // namespace lockstep::elastic
