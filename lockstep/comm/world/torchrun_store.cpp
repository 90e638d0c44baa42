#include <lockstep/comm/world/torchrun_store.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <charconv>
#include <mutex>
#include <thread>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/backends/engine/engine_group.h>
#include <lockstep/net/secret.h>

namespace lockstep::comm {

namespace {

using Bytes = std::vector<std::uint8_t>;

// The form of our values in c10d's store: "<version>.<writer>:<value>". It is never empty, because
// an empty expectation means "no such key" to c10d. No two writes are alike, because c10d answers a
// failed comparison with the current value, which must not look like the wanted one.
struct Held {
  Bytes raw;  // empty: no such key
  std::uint64_t version = 0;
  std::string value;
};

Held parse(Bytes raw) {
  Held held;
  const auto colon = std::find(raw.begin(), raw.end(), std::uint8_t{':'});
  const auto dot = std::find(raw.begin(), colon, std::uint8_t{'.'});
  const std::string number(raw.begin(), dot);
  const auto [end, error] =
      std::from_chars(number.data(), number.data() + number.size(), held.version);
  if (colon == raw.end() || error != std::errc() || end != number.data() + number.size())
    throw CommError({.fault = Fault::corrupted,
                     .operation = "reading torchrun's store",
                     .group = "world",
                     .explanation = "a key of ours holds something that is not ours: another "
                                    "program writes to the store at MASTER_ADDR:MASTER_PORT"});
  held.value.assign(colon + 1, raw.end());
  held.raw = std::move(raw);
  return held;
}

Bytes serialize(std::uint64_t version, const std::string& writer, const std::string& value) {
  const std::string text = fmt::format("{}.{}:{}", version, writer, value);
  return {text.begin(), text.end()};
}

// The pauses of waits that poll: short at first, because most waits are short, later a tenth of a
// second.
class Poll {
 public:
  explicit Poll(const Deadline& deadline) : deadline_(deadline) {}

  bool pause() {
    if (deadline_.passed()) return false;
    const auto left = std::chrono::ceil<milliseconds>(deadline_.remaining());
    std::this_thread::sleep_for(std::min(left, span_));
    span_ = std::min(span_ * 2, milliseconds(100));
    return true;
  }

 private:
  const Deadline& deadline_;
  milliseconds span_{1};
};

class TorchrunStore final : public store::Store {
 public:
  TorchrunStore(const TorchrunStoreOptions& options, const Deadline& deadline) {
    c10d::TCPStoreOptions settings;
    settings.port = static_cast<std::uint16_t>(options.port);
    settings.isServer = options.hosted_here;
    settings.waitWorkers = false;
    settings.timeout =
        std::max(std::chrono::ceil<milliseconds>(deadline.remaining()), milliseconds(1));
    // Newer versions default to libuv, which not every build has; both speak the same protocol.
    [](auto& newer) {
      if constexpr (requires { newer.useLibUV; }) newer.useLibUV = false;
    }(settings);
    try {
      store_ = c10::make_intrusive<c10d::TCPStore>(options.host, settings);
    } catch (const std::exception& error) {
      throw CommError(
          {.fault = Fault::timeout,
           .operation = "connecting to torchrun's store",
           .group = "world",
           .explanation = fmt::format("{}:{} {}: {}", options.host, options.port,
                                      options.hosted_here ? "cannot be served" : "does not answer",
                                      backends::engine_text(error.what()))});
    }
  }

  void set(const std::string& key, const std::string& value, Deadline deadline) override {
    check_sizes(key, value);
    for (;;)
      if (replace(key, read(key, deadline), value, deadline)) return;
  }

  std::optional<std::string> get(const std::string& key, Deadline deadline) override {
    check_sizes(key, "");
    Held held = read(key, deadline);
    if (held.raw.empty()) return std::nullopt;
    return std::move(held.value);
  }

  std::vector<std::string> wait(const std::vector<std::string>& keys, Deadline deadline) override {
    for (const std::string& key : keys) check_sizes(key, "");
    std::vector<std::string> values;
    Poll poll(deadline);
    while (values.size() < keys.size()) {
      Held held = read(keys[values.size()], deadline);
      if (!held.raw.empty())
        values.push_back(std::move(held.value));
      else if (!poll.pause())
        timed_out(missing_of(keys), deadline);
    }
    return values;
  }

  std::string compare_and_set(const std::string& key, const std::optional<std::string>& expected,
                              const std::string& desired, Deadline deadline) override {
    check_sizes(key, desired);
    for (;;) {
      const Held held = read(key, deadline);
      const bool matches =
          expected ? !held.raw.empty() && held.value == *expected : held.raw.empty();
      if (!matches) return held.value;
      if (replace(key, held, desired, deadline)) return desired;
    }
  }

  std::int64_t add(const std::string& key, std::int64_t amount, Deadline deadline) override {
    check_sizes(key, "");
    for (;;) {
      const Held held = read(key, deadline);
      std::int64_t value = 0;
      const auto [end, error] =
          std::from_chars(held.value.data(), held.value.data() + held.value.size(), value);
      if (!held.raw.empty() &&
          (error != std::errc() || end != held.value.data() + held.value.size()))
        throw UsageError("add: the key '{}' does not hold a number", key);
      if (__builtin_add_overflow(value, amount, &value))
        throw UsageError("add: the counter '{}' would overflow", key);
      if (replace(key, held, std::to_string(value), deadline)) return value;
    }
  }

  store::Versioned watch(const std::string& key, std::uint64_t seen, Deadline deadline) override {
    check_sizes(key, "");
    for (Poll poll(deadline);;) {
      Held held = read(key, deadline);
      if (!held.raw.empty() && held.version > seen) return {std::move(held.value), held.version};
      if (!poll.pause()) timed_out({key}, deadline);
    }
  }

  bool remove(const std::string& key, Deadline deadline) override {
    check_sizes(key, "");
    return call(deadline, [&] { return store_->deleteKey(name(key)); });
  }

 private:
  static constexpr milliseconds kVanished{500};

  static std::string name(const std::string& key) { return "lockstep/" + key; }

  static void check_sizes(const std::string& key, const std::string& value) {
    if (key.size() > store::kLongestKey)
      throw UsageError("a key of {} bytes is too long for the store (at most {})", key.size(),
                       store::kLongestKey);
    if (value.size() > store::kLongestValue)
      throw UsageError("the value of '{}' has {} bytes, too many for the store (at most {})", key,
                       value.size(), store::kLongestValue);
  }

  // Makes one request at a time: c10d's client is not thread-safe in every version.
  template <typename Request>
  auto call(const Deadline& deadline, const Request& request) -> decltype(request()) {
    std::lock_guard lock(mutex_);
    try {
      store_->setTimeout(
          std::max(std::chrono::ceil<milliseconds>(deadline.remaining()), milliseconds(1)));
      return request();
    } catch (const std::exception& error) {
      throw CommError({.fault = deadline.passed() ? Fault::timeout : Fault::peer_lost,
                       .operation = "a request to torchrun's store",
                       .group = "world",
                       .explanation = backends::engine_text(error.what())});
    }
  }

  Held read(const std::string& key, const Deadline& deadline) {
    Bytes raw = call(deadline, [&]() -> Bytes {
      // c10d's get would wait for a key that does not exist.
      if (!store_->check({name(key)})) return {};
      store_->setTimeout(kVanished);
      try {
        return store_->get(name(key));
      } catch (const std::exception&) {
        // Another process may have removed the key just now.
        if (!store_->check({name(key)})) return {};
        throw;
      }
    });
    return raw.empty() ? Held{} : parse(std::move(raw));
  }

  // Writes a value in place of `held`; false if another process was faster.
  bool replace(const std::string& key, const Held& held, const std::string& value,
               const Deadline& deadline) {
    const Bytes wanted =
        serialize(next_version(held, deadline), fmt::format("{:x}-{}", writer_, ++writes_), value);
    return call(deadline, [&] { return store_->compareSet(name(key), held.raw, wanted); }) ==
           wanted;
  }

  // Grows with every write, and also when a key is removed and made again: new keys start at a
  // multiple of 2^20 that no other key has had.
  std::uint64_t next_version(const Held& held, const Deadline& deadline) {
    if (!held.raw.empty()) return held.version + 1;
    const auto turn = call(deadline, [&] { return store_->add("lockstep.versions", 1); });
    return static_cast<std::uint64_t>(turn) << 20;
  }

  std::vector<std::string> missing_of(const std::vector<std::string>& keys) {
    const Deadline moment = Deadline::after(milliseconds(1000));
    std::vector<std::string> missing;
    for (const std::string& key : keys)
      if (read(key, moment).raw.empty()) missing.push_back(key);
    return missing;
  }

  [[noreturn]] static void timed_out(const std::vector<std::string>& keys,
                                     const Deadline& deadline) {
    throw CommError({.fault = Fault::timeout,
                     .operation = "waiting in torchrun's store",
                     .group = "world",
                     .explanation = fmt::format("after {:.1f} s nobody had set {}",
                                                deadline.span_seconds(), fmt::join(keys, ", "))});
  }

  static std::uint64_t random_number() {
    std::array<std::byte, sizeof(std::uint64_t)> bytes;
    net::fill_random(bytes);
    return std::bit_cast<std::uint64_t>(bytes);
  }

  const std::uint64_t writer_ = random_number();
  std::atomic<std::uint64_t> writes_{0};
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::TCPStore> store_;
};

}  // namespace

TorchrunStoreOptions torchrun_store_options(const LaunchEnvironment& launch) {
  if (launch.master_addr.empty() || launch.master_port == 0)
    throw UsageError("torchrun's store cannot be found: {} is not set; start the program with "
                     "torchrun or lockstep run, or set MASTER_ADDR and MASTER_PORT",
                     launch.master_addr.empty() ? "MASTER_ADDR" : "MASTER_PORT");
  const auto agents = environment_variable("TORCHELASTIC_USE_AGENT_STORE");
  const bool agent_hosts = agents && (*agents == "True" || *agents == "true" || *agents == "1");
  return {.host = launch.master_addr,
          .port = launch.master_port,
          .hosted_here = !agent_hosts && launch.rank == 0};
}

std::shared_ptr<store::Store> make_torchrun_store(const TorchrunStoreOptions& options,
                                                  Deadline deadline) {
  return std::make_shared<TorchrunStore>(options, deadline);
}

}  // namespace lockstep::comm
