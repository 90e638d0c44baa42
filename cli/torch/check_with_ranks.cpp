#include <cli/torch/check_with_ranks.h>

#include <cli/torch/relaunch.h>

namespace lockstep::cli::inspection {

Relaunched check_with_ranks(int num_ranks, const std::string& backend) {
  const Reported reported = report_from_ranks("check", {"--backend", backend}, num_ranks);
  Relaunched result;
  result.exit_code = reported.exit_code;
  if (result.exit_code == 0) nlohmann::json::parse(reported.text).get_to(result.report);
  return result;
}

}  // namespace lockstep::cli::inspection
