// config.json of a Hugging Face folder and, after a zero byte, the name of a tensor.
#include <string>

#include <lockstep/base/error.h>
#include <lockstep/models/spec/hugging_face.h>

#include "target.h"

namespace lockstep::fuzz {

void run(std::span<const std::byte> input) {
  std::string text(reinterpret_cast<const char*>(input.data()), input.size());
  std::string tensor;
  if (const auto zero = text.find('\0'); zero != std::string::npos) {
    tensor = text.substr(zero + 1);
    text.resize(zero);
  }
  models::ModelConfig config;
  try {
    config = models::from_hugging_face(text, "fuzzed.json");
  } catch (const UsageError& error) {
    const std::string_view what = error.what();
    require(what.find("fuzzed.json") != what.npos, "a message names the file");
    require(what.size() < 1500, "a message is short");
    return;
  }
  const std::string again = models::to_hugging_face(config);
  require(models::to_hugging_face(models::from_hugging_face(again, "again.json")) == again,
          "what is read can be written, and reads the same");
  require(models::num_parameters(config) > 0, "a model has parameters");
  if (const auto parameter = models::parameter_of(config, tensor)) {
    require(parameter->size() <= tensor.size() + 20, "a name is made of the file's");
    models::stored_transposed(config, *parameter);
    require(!models::file_name_of(*parameter).empty(), "a parameter has a name in a file");
  }
}

}  // namespace lockstep::fuzz
