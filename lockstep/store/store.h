// The interface of the job's key-value store, through which ranks exchange messages before they can
// communicate directly.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>

namespace lockstep::store {

// Limits of a store. Larger requests are refused before memory is taken.
inline constexpr std::size_t kLongestKey = 1024;
inline constexpr std::size_t kLongestValue = 1 << 20;
inline constexpr std::size_t kMostKeysInWait = 1 << 16;
inline constexpr std::size_t kStoreCapacityBytes = 256 << 20;

// A key's state as `watch` sees it. Versions of one key only grow.
struct Versioned {
  std::string value;
  std::uint64_t version = 0;
};

// All calls block, each has a deadline, and any thread may make them. They throw UsageError for
// keys or values over the limits and for a store that is full, and CommError (timeout, peer_lost,
// refused) otherwise.
class Store {
 public:
  virtual ~Store() = default;

  virtual void set(const std::string& key, const std::string& value, Deadline deadline) = 0;

  // Returns nothing if the key does not exist.
  virtual std::optional<std::string> get(const std::string& key, Deadline deadline) = 0;

  // Blocks until every key exists, and returns their values. The timeout's text lists the missing
  // keys.
  virtual std::vector<std::string> wait(const std::vector<std::string>& keys,
                                        Deadline deadline) = 0;

  // Sets the key to `desired` if its value is `expected` (nothing: if it does not exist). Returns
  // the value afterwards: `desired` on success, otherwise the current value (an empty text if the
  // key does not exist).
  virtual std::string compare_and_set(const std::string& key,
                                      const std::optional<std::string>& expected,
                                      const std::string& desired, Deadline deadline) = 0;

  // Adds to a decimal counter, which starts at 0, and returns the sum. UsageError if the key holds
  // something else or the sum overflows.
  virtual std::int64_t add(const std::string& key, std::int64_t amount, Deadline deadline) = 0;

  // Blocks until the key's version exceeds `seen` (0: until it exists) and returns it.
  virtual Versioned watch(const std::string& key, std::uint64_t seen, Deadline deadline) = 0;

  // Returns true if the key existed.
  virtual bool remove(const std::string& key, Deadline deadline) = 0;
};

}  // namespace lockstep::store
