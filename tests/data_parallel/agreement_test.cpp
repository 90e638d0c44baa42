// The traffic of a group whose messages are on one device, as NCCL's are.
#include <lockstep/parallel/data_parallel/agreement.h>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>

namespace lockstep::data_parallel {
namespace {

using ::testing::ElementsAre;

struct Done : comm::PendingCall {
  bool done() const override { return true; }
  void wait_on_host(Deadline) override {}
  void wait() override {}
};

// Takes only tensors of the meta device, which every machine has, and records its calls.
class OneDeviceGroup : public comm::Communicator {
 public:
  OneDeviceGroup() : Communicator({}, milliseconds(1000)) {}
  std::string backend() const override { return "one device"; }
  bool canonical_order() const override { return true; }
  std::optional<std::vector<std::uint64_t>> sent_bytes() const override { return std::nullopt; }

  std::vector<std::pair<at::ScalarType, std::size_t>> calls;  // dtype and number of tensors

 private:
  std::shared_ptr<comm::PendingCall> do_start(comm::Call call) override {
    calls.emplace_back(call.outputs.front().scalar_type(), call.outputs.size());
    return std::make_shared<Done>();
  }
  std::shared_ptr<Communicator> do_split(const comm::SplitRequest&, Deadline) override {
    return nullptr;
  }
  void do_abort(const std::string&) override {}
  at::Tensor do_allocate(at::IntArrayRef sizes, at::ScalarType dtype) override {
    return at::empty(sizes, dtype);
  }
  void do_check(comm::Operation, const at::Tensor& tensor) const override {
    if (!tensor.is_meta()) throw UsageError("a tensor on {}", tensor.device().str());
  }
};

TEST(BroadcastFromFirst, StagesWhatLiesElsewhereThanTheGroupsMessages) {
  const auto meta = at::device(at::kMeta);
  const std::vector<NamedTensor> state = {{"moment", at::zeros({3}, meta)},
                                          {"step", at::zeros({}, at::kLong)},
                                          {"more", at::zeros({2, 2}, meta)},
                                          {"other step", at::zeros({}, at::kLong)}};
  OneDeviceGroup group;
  // A meta tensor has no values, so the test has to end where they are copied back.
  EXPECT_THROW(broadcast_from_first(state, group, at::kMeta), c10::Error);
  EXPECT_THAT(group.calls, ElementsAre(std::pair(at::kFloat, 2), std::pair(at::kLong, 2)));
}

TEST(BroadcastFromFirst, GoesFromWhereThingsLieIfNoDeviceIsGiven) {
  const std::vector<NamedTensor> tensors = {{"here", at::zeros({3})},
                                            {"there", at::zeros({3}, at::device(at::kMeta))}};
  OneDeviceGroup group;
  EXPECT_THROW(broadcast_from_first(tensors, group), UsageError) << "one call for each device";
  EXPECT_THAT(group.calls, ElementsAre());
  broadcast_from_first(std::span(tensors).last(1), group);
  EXPECT_THAT(group.calls, ElementsAre(std::pair(at::kFloat, 1)));
}

}  // namespace
}  // namespace lockstep::data_parallel
