// A server on loopback and clients of it.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include <lockstep/base/error.h>
#include <lockstep/net/secret.h>
#include <lockstep/store/client.h>
#include <lockstep/store/server.h>

namespace lockstep::store {

// Long enough for a busy machine: reached only where something hangs.
inline Deadline soon() { return Deadline::after(std::chrono::seconds(30)); }
inline Deadline in(int ms) { return Deadline::after(milliseconds(ms)); }

class StoreTest : public testing::Test {
 protected:
  std::unique_ptr<Client> client() const {
    return std::make_unique<Client>(server_->address(), secret_, soon());
  }

  net::Secret secret_ = net::Secret::random();
  std::unique_ptr<Server> server_ = std::make_unique<Server>(net::Address{"127.0.0.1", 0}, secret_);
};

// The fault of the CommError that `call` throws, and its text.
template <typename Call>
std::pair<Fault, std::string> comm_error(Call&& call) {
  try {
    call();
  } catch (const CommError& error) {
    return {error.fault(), error.what()};
  }
  ADD_FAILURE() << "no CommError was thrown";
  return {};
}

template <typename Call>
std::string usage_error(Call&& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no UsageError was thrown";
  return {};
}

}  // namespace lockstep::store
