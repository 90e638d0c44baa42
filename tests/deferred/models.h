// Models whose deferred construction is compared with the usual one.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

namespace lockstep::deferred::testing {

struct Model {
  std::string name;
  std::function<std::shared_ptr<torch::nn::Module>()> make;
  bool all_deferred = true;  // every parameter and buffer of 64 KiB and more is deferred
};

std::vector<Model> models();

}  // namespace lockstep::deferred::testing
