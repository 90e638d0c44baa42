// What a rank's cells share: the group, the device, and where failures are written down.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>

namespace lockstep::comm::conformance {

// Numbers of elements: 0, 1, odd; beyond one round (16 KiB), and beyond a slot (128 KiB).
inline constexpr std::int64_t kSizes[] = {0, 1, 17, 8191};
inline constexpr std::int64_t kLarge = 300'007;

// One rank's run through the suite. A cell that finds a wrong value says so and goes on, so that
// one run shows all of them; what a cell throws ends the rank, since the group may be dead. All
// ranks run the same cells in the same order.
class Suite {
 public:
  Suite(Communicator& group, c10::Device device) : group_(group), device_(device) {}

  Communicator& group() { return group_; }
  // Whether groups are over our transports, with NCCL beside them or without.
  bool is_ours() const { return group_.canonical_order() || !group_.lane().empty(); }
  int rank() const { return group_.rank(); }
  int size() const { return group_.size(); }
  c10::Device device() const { return device_; }
  // All that the group lets a caller choose from.
  std::vector<Algorithm> algorithms(Operation operation) const;

  void cell(const std::string& name, const std::function<void()>& body);

  // The cell that runs now, or ran last.
  const std::string& current() const { return current_; }
  int num_cells() const { return num_cells_; }
  int num_failures() const { return num_failures_; }

  void expect(bool good, const std::string& otherwise);
  // Bit for bit; a NaN equals any NaN.
  void expect_same(const at::Tensor& got, const at::Tensor& wanted, const std::string& what);
  void expect_text(const std::string& text, const std::string& part);

  // A copy on the device under test.
  at::Tensor place(const at::Tensor& host) const;
  // Room on it, filled with something that is no result.
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
