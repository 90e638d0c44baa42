#include <lockstep/intercept/memory_readers.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include <c10/util/Backtrace.h>
#include <c10/util/Logging.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/export.h>

#include <lockstep/intercept/key.h>

namespace lockstep::intercept {

namespace {

// LibTorch calls this before it writes a byte of what is in the archive.
torch::jit::ExtraFilesMap ask_owners(const torch::jit::Module& archive) {
  c10::IValue(archive._ivalue()).visit([](const c10::IValue& value) {
    if (value.isTensor())
      for (const auto& owner : owners_of(value.toTensor())) owner->on_save(value.toTensor());
    return false;  // go on with what is inside
  });
  return {};
}

// Functions in which LibTorch finds that there is no memory, by parts of their names.
constexpr std::array<std::string_view, 2> kReaders = {"data_ptr<", "throw_storage_access_error"};

std::string stack_with_advice() {
  // Without this function and what calls it.
  std::string stack = c10::get_backtrace(/*frames_to_skip=*/3);
  if (std::ranges::none_of(kReaders, [&](std::string_view reader) {
        return stack.find(reader) != std::string::npos;
      }))
    return stack;
  return "Lockstep: a parameter that is cut over ranks (FULL_SHARD, HYBRID_SHARD, "
         "parallelize_module) has memory of its own only while an operator uses it. Read it while "
         "what full_parameters() returned lives, or take the values that full_state_dict() "
         "returns\n" +
         stack;
}

}  // namespace

void hear_of_memory_readers() {
  torch::jit::SetExportModuleExtraFilesHook(ask_owners);
  c10::SetStackTraceFetcher(std::function<std::string()>(stack_with_advice));
}

}  // namespace lockstep::intercept
