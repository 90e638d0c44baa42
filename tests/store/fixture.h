// A server on loopback, and clients of it.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include <lockstep/net/secret.h>
#include <lockstep/store/client.h>
#include <lockstep/store/server.h>

#include "../base/errors.h"

namespace lockstep::store {

// Long enough for a busy machine; it is only reached if something hangs.
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

}  // namespace lockstep::store
