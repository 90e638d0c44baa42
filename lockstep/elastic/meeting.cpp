#include <lockstep/elastic/meeting.h>

namespace lockstep::elastic {

Introduction introduce(const MeetingOptions& options, const std::string& address) {
  return {.node_rank = options.node_rank.value_or(-1),
          .min_nodes = options.min_nodes,
          .max_nodes = options.max_nodes,
          .num_ranks = options.num_local_ranks,
          .host = options.host,
          .run_id = options.run_id,
          .address = address};
}

}  // namespace lockstep::elastic
