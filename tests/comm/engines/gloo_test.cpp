// Gloo behind our interface: its results, and the keys that it leaves in the store.
#include <mutex>
#include <set>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/world/torchrun_store.h>

#include "gloo.h"
#include "operations.h"

namespace lockstep::comm::backends {
namespace {

using testing::HasSubstr;

TEST_F(Gloo, ComputesEverything) {
  for (const int size : {1, 2, 3}) {
    run_ranks(size, [&](int rank) {
      auto group = gloo(job_, rank, size);
      EXPECT_EQ(group->backend(), "gloo");
      check_operations(*group);
      check_forms(*group);
    });
  }
}

TEST_F(Gloo, Splits) {
  run_ranks(3, [&](int rank) {
    auto group = gloo(job_, rank, 3);
    check_splits(*group);
    check_splits(*group);
  });
}

TEST_F(Gloo, ComputesWithTheLedgerBeside) {
  run_ranks(2, [&](int rank) {
    auto group = gloo(job_, rank, 2, milliseconds(20'000), LedgerMode::beside);
    check_forms(*group);
  });
}

TEST_F(Gloo, RefusesOtherDevices) {
  run_ranks(1, [&](int rank) {
    auto group = gloo(job_, rank, 1);
    EXPECT_THROW(group->all_reduce(at::empty({3}, at::TensorOptions().device(at::kMeta))),
                 UsageError);
  });
}

// A store that notes its keys.
class Noting final : public store::Store {
 public:
  explicit Noting(std::shared_ptr<store::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value, Deadline deadline) override {
    note(key);
    store_->set(key, value, deadline);
  }
  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    return store_->get(key, deadline);
  }
  std::vector<std::string> wait(const std::vector<std::string>& keys, Deadline deadline) override {
    return store_->wait(keys, deadline);
  }
  std::string compare_and_set(const std::string& key, const std::optional<std::string>& expected,
                              const std::string& desired, Deadline deadline) override {
    note(key);
    return store_->compare_and_set(key, expected, desired, deadline);
  }
  std::int64_t add(const std::string& key, std::int64_t amount, Deadline deadline) override {
    note(key);
    return store_->add(key, amount, deadline);
  }
  store::Versioned watch(const std::string& key, std::uint64_t seen, Deadline deadline) override {
    return store_->watch(key, seen, deadline);
  }
  bool remove(const std::string& key, Deadline deadline) override {
    return store_->remove(key, deadline);
  }

  std::set<std::string> written() {
    std::lock_guard lock(mutex_);
    return written_;
  }
  // The keys that still exist.
  std::vector<std::string> left() {
    std::vector<std::string> keys;
    for (const std::string& key : written())
      if (store_->get(key, Deadline::after(milliseconds(5000)))) keys.push_back(key);
    return keys;
  }

 private:
  void note(const std::string& key) {
    std::lock_guard lock(mutex_);
    written_.insert(key);
  }

  std::shared_ptr<store::Store> store_;
  std::mutex mutex_;
  std::set<std::string> written_;
};

TEST_F(Gloo, LeavesNoKeysBehind) {
  auto store = std::make_shared<Noting>(job_.connect());
  run_ranks(2, [&](int rank) {
    auto group = make_group("gloo", group_info("world", rank, 2),
                            {.store = store, .timeout = milliseconds(20'000)});
    for (int i = 0; i < 600; ++i) group->barrier().wait();
    at::Tensor tensor = at::ones({4}, at::kFloat);
    group->exchange({rank == 0 ? send_to(1, tensor) : receive_from(0, tensor)}).wait();
    if (rank == 0) {
      std::this_thread::sleep_for(milliseconds(500));
      // Compared calls are removed as the group goes on.
      EXPECT_LT(store->left().size(), 400u);
    }
    group->barrier().wait();
  });
  EXPECT_GT(store->written().size(), 600u);
  // Only the count of groups of this name that each rank has made is kept.
  for (const std::string& key : store->left()) EXPECT_THAT(key, HasSubstr("/made"));
}

// A program under torchrun has no store of ours.
TEST_F(Gloo, WorksOverTorchrunsStore) {
  int port = 0;
  {
    store::Server probe({.host = "127.0.0.1", .port = 0}, net::Secret::random());
    port = probe.address().port;
  }
  std::vector<std::shared_ptr<store::Store>> stores;
  for (int rank = 0; rank < 2; ++rank)
    stores.push_back(
        make_torchrun_store({.host = "127.0.0.1", .port = port, .hosted_here = rank == 0},
                            Deadline::after(milliseconds(5000))));
  std::atomic<int> caught{0};
  run_ranks(2, [&](int rank) {
    auto group = make_group(
        "gloo", group_info("world", rank, 2),
        {.store = stores[static_cast<std::size_t>(rank)], .timeout = milliseconds(20'000)});
    check_forms(*group);
    const auto start = Clock::now();
    try {
      group->all_reduce(at::ones({4 + rank}, at::kFloat)).wait();
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_EQ(error.fault(), Fault::mismatch) << error.what();
      EXPECT_LT(Clock::now() - start, milliseconds(10'000)) << "not by the deadline";
      ++caught;
    }
  });
  EXPECT_EQ(caught, 2);
}

}  // namespace
}  // namespace lockstep::comm::backends
