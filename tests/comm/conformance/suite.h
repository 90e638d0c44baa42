// The state that a rank's cells share: the group, the device, and the failures.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>

namespace lockstep::comm::conformance {

// Numbers of elements: 0, 1, odd numbers; more than one round (16 KiB), and more than a slot (128
// KiB).
inline constexpr std::int64_t kSizes[] = {0, 1, 17, 8191};
inline constexpr std::int64_t kLarge = 300'007;

// One rank's run through the suite. A cell that finds a wrong value prints a failure and goes on,
// so that one run shows all failures; an exception in a cell ends the rank, because the group may
// be dead. All ranks run the same cells in the same order.
class Suite {
 public:
  Suite(Communicator& group, c10::Device device) : group_(group), device_(device) {}

  Communicator& group() { return group_; }
  // Whether groups use our transports, with NCCL beside them or without.
  bool is_ours() const { return group_.canonical_order() || !group_.lane().empty(); }
  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }
  c10::Device device() const { return device_; }
  // All algorithms that the group offers for an operation.
  std::vector<Algorithm> algorithms(Operation operation) const;

  void cell(const std::string& name, const std::function<void()>& body);

  // The cell that is running, or ran last.
  const std::string& current() const { return current_; }
  int num_cells() const { return num_cells_; }
  int num_failures() const { return num_failures_; }

  void expect(bool good, const std::string& otherwise);
  // Compares bit for bit; a NaN equals any NaN.
  void expect_same(const at::Tensor& got, const at::Tensor& wanted, const std::string& what);
  void expect_text(const std::string& text, const std::string& part);

  // Copies a tensor to the device under test.
  at::Tensor place(const at::Tensor& host) const;
  // A tensor on that device, filled with a value that is no result.
  at::Tensor room(std::int64_t count, at::ScalarType dtype) const;

 private:
  Communicator& group_;
  c10::Device device_;
  std::string current_;
  int num_cells_ = 0;
  int num_failures_ = 0;
};

// The parts of the suite.
void check_reductions(Suite& suite);
void check_movement(Suite& suite);
void check_exchange(Suite& suite);
void check_launches(Suite& suite);
void check_memory(Suite& suite);
void check_groups(Suite& suite);
void check_bad_arguments(Suite& suite);
void check_ends(Suite& suite);

}  // namespace lockstep::comm::conformance
