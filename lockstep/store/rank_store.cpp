#include <lockstep/store/rank_store.h>

#include <thread>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>

namespace lockstep::store {

namespace {

constexpr milliseconds kOthersMayTake(5000);
constexpr milliseconds kRequest(5000);

}  // namespace

RankStore::RankStore(const net::Address& address, const net::Secret& secret,
                     std::unique_ptr<Server> server, int num_ranks, Deadline deadline)
    : Client(address, secret, deadline), server_(std::move(server)), num_ranks_(num_ranks) {}

RankStore::~RankStore() {
  const std::string key = "lockstep/ranks-done-with-the-store";
  const auto count = [&](int amount) { return add(key, amount, Deadline::after(kRequest)); };
  try {
    auto done = count(1);
    const Deadline patience = Deadline::after(kOthersMayTake);
    while (server_ && done < num_ranks_) {
      if (patience.passed()) {
        log::warn("{} of {} ranks have not left the store that this rank hosts, and lose it now",
                  num_ranks_ - done, num_ranks_);
        break;
      }
      std::this_thread::sleep_for(milliseconds(2));
      done = count(0);
    }
  } catch (const Error& error) {
    log::debug("leaving the store: {}", error.what());
  }
}

}  // namespace lockstep::store
