// One rank's run through the table of cells.
#pragma once

#include <string>

#include <lockstep/comm/communicator.h>

#include "subject.h"

namespace lockstep::parity {

// Counts cells, and writes down each value that is not what one process computes.
class Suite {
 public:
  explicit Suite(std::shared_ptr<comm::Communicator> group) : group_(std::move(group)) {}

  const std::shared_ptr<comm::Communicator>& group() const { return group_; }

  void cell(const std::string& name, const std::function<void()>& body);

  void expect(bool good, const std::string& otherwise);
  // Bit for bit; both undefined counts as the same.
  void expect_same(const at::Tensor& got, const at::Tensor& wanted, const std::string& what);
  void expect_close(const at::Tensor& got, const at::Tensor& wanted, const std::string& what);

  int num_cells() const { return num_cells_; }
  int num_failures() const { return num_failures_; }
  const std::string& current() const { return current_; }

 private:
  std::shared_ptr<comm::Communicator> group_;
  std::string current_;
  int num_cells_ = 0;
  int num_failures_ = 0;
};

// Data parallelism over every subject.
void check_data_parallel(Suite& suite);

}  // namespace lockstep::parity
