#include <lockstep/train/out_of_memory.h>

#include <new>
#include <string_view>

#include <lockstep/base/error.h>

namespace lockstep::train {

bool is_out_of_memory(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return true;
  // LibTorch has an exception class for GPUs only, and not in every version.
  const std::string_view text = error.what();
  for (const std::string_view sign :
       {"out of memory", "can't allocate memory", "not enough memory"})
    if (text.find(sign) != text.npos) return true;
  return false;
}

std::string out_of_memory_advice(const TrainConfig& config, const std::exception& error) {
  // LibTorch appends a stack trace after the first line.
  const std::string_view text = error.what();
  const std::string what(text.substr(0, text.find('\n')));
  return fmt::format(
      "out of memory: {}. Try a smaller train_micro_batch_size_per_gpu (with as many more "
      "gradient_accumulation_steps the result is the same), a shorter data.sequence_length (it is "
      "{}), {}{}or a smaller model",
      what, config.data.sequence_length,
      config.recomputed_blocks < 1 ? "activation_checkpointing.ratio 1, " : "",
      cuts_parameters(config.sharding.strategy)
          ? ""
          : "the sharding_strategy \"FULL_SHARD\" on several ranks, ");
}

}  // namespace lockstep::train
