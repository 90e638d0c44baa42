// Texts and numbers between ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/comm/communicator.h>

namespace lockstep {

// Every rank of the group calls the same functions at the same points.
//
// Ownership: shares the group. Threading: as the group. Failure: CommError from its calls.
class RankMessages {
 public:
  explicit RankMessages(std::shared_ptr<comm::Communicator> group) : group_(std::move(group)) {}

  const std::shared_ptr<comm::Communicator>& group() const { return group_; }
  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }
  bool is_first() const { return rank() == 0; }

  // The first rank's text, on every rank.
  std::string broadcast(const std::string& text) const;
  // Every rank's, on every rank, in their order.
  std::vector<std::string> gather(const std::string& text) const;
  // The sums of all ranks' numbers.
  std::vector<double> sum(std::vector<double> values) const;
  double sum(double value) const { return sum(std::vector{value}).front(); }
  // numbers[r] goes to rank r; gives what each rank had for this one.
  std::vector<std::vector<std::int64_t>> deal(
      const std::vector<std::vector<std::int64_t>>& numbers) const;

  // Communicator::exchange of tensors in the host's memory; done when it returns. Only the ranks of
  // its transfers call it.
  void exchange(const std::vector<comm::Transfer>& transfers) const;

 private:
  std::shared_ptr<comm::Communicator> group_;
};

// Checks that all ranks were told the same things: where one reads an older config, or another file
// of the same name, each would train something else, and nobody would know. Every rank calls it,
// with a line for each thing, as "seed is 7". UsageError on all of them, with the lines that
// differ, where a rank's are not rank 0's.
void check_told_the_same(const std::vector<std::string>& lines, const RankMessages& ranks);

}  // namespace lockstep
