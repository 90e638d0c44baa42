#include <cli/num_ranks.h>

#include <lockstep/base/error.h>
#include <lockstep/device/host/host.h>
#include <lockstep/launch/processes/rank_setup.h>

#include <cli/flags.h>

namespace lockstep::cli {

int num_local_ranks(const std::string& text) {
  const std::string flag = "--nproc-per-node";
  const auto num_cores = [] { return device::Host().num_usable_cores(); };
  const int num_gpus = launch::num_visible_gpus();
  if (text == "cpu") return num_cores();
  if (text == "auto") return num_gpus > 0 ? num_gpus : num_cores();
  if (text == "gpu" || text.starts_with("gpu:")) {
    const int wanted =
        text == "gpu" ? num_gpus : parse_integer(text.substr(4), flag, 1, kMostRanks);
    if (num_gpus == 0)
      throw UsageError("{} {}: this host has no GPU (none in /dev/nvidia*, or CUDA_VISIBLE_DEVICES "
                       "hides them): give a plain number, and the ranks use the CPU",
                       flag, text);
    if (wanted > num_gpus)
      throw UsageError(
          "{} {}: {} ranks with a GPU each need {} GPUs, and this host has {} (counted "
          "in /dev/nvidia*, limited by CUDA_VISIBLE_DEVICES): ask for fewer, or give a "
          "plain number so that ranks share GPUs or use the CPU",
          flag, text, wanted, wanted, num_gpus);
    return wanted;
  }
  if (text.empty() || text.find_first_not_of("0123456789-") != std::string::npos)
    throw UsageError("{} is '{}': it must be a number of ranks, auto, cpu, gpu, or gpu:N for N "
                     "ranks with a GPU each",
                     flag, text);
  return parse_integer(text, flag, 1, kMostRanks);
}

}  // namespace lockstep::cli
