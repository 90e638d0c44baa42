#include <lockstep/comm/engines/c10d_store.h>

#include <mutex>
#include <set>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>

namespace lockstep::comm::engines {

namespace {

using Bytes = std::vector<std::uint8_t>;

std::string to_text(const Bytes& bytes) { return {bytes.begin(), bytes.end()}; }
Bytes to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

// What clones share: the store, and which keys to tidy up.
class Shared {
 public:
  Shared(std::shared_ptr<store::Store> store, std::string prefix)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}

  ~Shared() {
    try {
      for (const std::string& key : written_) store_->remove(key, Deadline::after(kTidyUp));
    } catch (const Error& error) {
      log::debug("keys of {} stay behind: {}", prefix_, error.what());
    }
  }

  store::Store& store() { return *store_; }
  std::string name(const std::string& key) const { return prefix_ + "/" + key; }

  std::string written(const std::string& key) {
    std::lock_guard lock(mutex_);
    return *written_.insert(name(key)).first;
  }
  void removed(const std::string& key) {
    std::lock_guard lock(mutex_);
    written_.erase(name(key));
  }

 private:
  static constexpr milliseconds kTidyUp{5000};

  std::shared_ptr<store::Store> store_;
  std::string prefix_;
  std::mutex mutex_;
  std::set<std::string> written_;
};

class JobStore final : public c10d::Store {
 public:
  JobStore(std::shared_ptr<Shared> shared, milliseconds timeout)
      : c10d::Store(timeout), shared_(std::move(shared)) {}

  // Overrides it in the versions that have it.
  c10::intrusive_ptr<c10d::Store> clone() {
    return c10::make_intrusive<JobStore>(shared_, timeout_);
  }

  void set(const std::string& key, const Bytes& value) override {
    shared_->store().set(shared_->written(key), to_text(value), deadline());
  }

  Bytes compareSet(const std::string& key, const Bytes& current, const Bytes& wanted) override {
    const auto expected = current.empty() ? std::nullopt : std::optional(to_text(current));
    return to_bytes(shared_->store().compare_and_set(shared_->written(key), expected,
                                                     to_text(wanted), deadline()));
  }

  // Blocks until the key is there, as c10d's stores do.
  Bytes get(const std::string& key) override {
    return to_bytes(shared_->store().wait({shared_->name(key)}, deadline()).front());
  }

  std::int64_t add(const std::string& key, std::int64_t value) override {
    return shared_->store().add(shared_->written(key), value, deadline());
  }

  bool deleteKey(const std::string& key) override {
    const bool existed = shared_->store().remove(shared_->name(key), deadline());
    shared_->removed(key);
    return existed;
  }

  bool check(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys)
      if (!shared_->store().get(shared_->name(key), deadline())) return false;
    return true;
  }

  std::int64_t getNumKeys() override {
    TORCH_CHECK(false, "the job's store does not count its keys");
  }

  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }

  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    std::vector<std::string> names;
    for (const std::string& key : keys) names.push_back(shared_->name(key));
    shared_->store().wait(names, Deadline::after(timeout));
  }

 private:
  Deadline deadline() const { return Deadline::after(timeout_); }

  std::shared_ptr<Shared> shared_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> make_c10d_store(std::shared_ptr<store::Store> store,
                                                std::string prefix, milliseconds timeout) {
  return c10::make_intrusive<JobStore>(
      std::make_shared<Shared>(std::move(store), std::move(prefix)), timeout);
}

}  // namespace lockstep::comm::engines
