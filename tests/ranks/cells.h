// Tests whose ranks are processes. One job runs a whole table of cells, because starting a process
// that loads LibTorch costs half a second.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>

namespace lockstep::ranks {

// One rank's run through the table. A cell that finds a wrong value prints a failure and goes on,
// so that one run shows all of them. All ranks run the same cells in the same order.
class Cells {
 public:
  // Runs only the cells with `only` in their names.
  explicit Cells(std::shared_ptr<comm::Communicator> group, std::string only = "")
      : group_(std::move(group)), only_(std::move(only)) {}

  const std::shared_ptr<comm::Communicator>& group() const { return group_; }
  int rank() const { return group_->rank(); }
  int num_ranks() const { return group_->size(); }

  // Whether a cell of this name runs.
  bool runs(const std::string& name) const { return name.find(only_) != std::string::npos; }
  // The first rank says how long it took.
  void cell(const std::string& name, const std::function<void()>& body);

  void expect(bool good, const std::string& otherwise);
  // Compares bit for bit; two undefined tensors are the same.
  void expect_same(const at::Tensor& got, const at::Tensor& wanted, const std::string& what);
  // Compares within the rounding of sums in another order.
  void expect_close(const at::Tensor& got, const at::Tensor& wanted, const std::string& what);
  // Expects that `body` throws a UsageError whose text contains `part`.
  void expect_usage_error(const std::function<void()>& body, const std::string& part);

  const std::string& current() const { return current_; }
  int num_cells() const { return num_cells_; }
  int num_failures() const { return num_failures_; }

 private:
  std::shared_ptr<comm::Communicator> group_;
  std::string only_;
  std::string current_;
  int num_cells_ = 0;
  int num_failures_ = 0;
};

// The main() of a rank: joins the job, runs the table, and prints the result. Returns the exit
// code.
int run_cells(const std::function<void(Cells&)>& table, const std::string& only = "");
// The same for a rank that has joined by itself.
int run_cells(const std::shared_ptr<comm::Communicator>& group,
              const std::function<void(Cells&)>& table, const std::string& only = "");

}  // namespace lockstep::ranks
