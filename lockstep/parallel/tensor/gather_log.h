// What was not computed on parts: tensors that were put together for an operator that needs all of
// them.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::tensor {

struct Gathered {
  std::string op;      // "aten::layer_norm"
  std::string source;  // the parameter, or the layer whose output it came from: "blocks.0.fc1"
  std::int64_t calls = 0;
  std::int64_t bytes = 0;  // of the whole tensors, together
};

// Says in the log of the first rank, once for each operator, that it gathers.
//
// Threading: any.
class GatherLog {
 public:
  // `speaks`: on the rank that says it.
  explicit GatherLog(bool speaks) : speaks_(speaks) {}

  void add(const std::string& op, const std::string& source, std::int64_t bytes);

  // In the order of names.
  std::vector<Gathered> all() const;
  void clear();

 private:
  struct Count {
    std::int64_t calls = 0;
    std::int64_t bytes = 0;
  };

  const bool speaks_;
  mutable std::mutex mutex_;
  std::map<std::string, bool> said_;  // of operators; stays when the counts are cleared
  std::map<std::pair<std::string, std::string>, Count> counts_;
};

}  // namespace lockstep::tensor
