// What one process computes is the same for many cells. One rank computes it, once, and tells the
// others; each rank does so for a share of it, at the same time.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <tests/ranks/cells.h>

namespace lockstep::parity {

// By name; undefined ones too. They are on the host.
using Values = std::map<std::string, at::Tensor>;

class References {
 public:
  // Each key once, by the same order of calls on all ranks.
  void add(const std::string& key, std::function<Values()> compute);

  // To be called by all ranks together, after the last add(). What they tell each other goes by way
  // of `device`.
  void compute(comm::Communicator& group, c10::Device device);

  const Values& of(const std::string& key) const { return values_.at(key); }

 private:
  std::vector<std::pair<std::string, std::function<Values()>>> to_compute_;
  std::map<std::string, Values> values_;
};

}  // namespace lockstep::parity
