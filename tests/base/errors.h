// Returns the error that a call throws, for tests that look at it.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include <lockstep/base/error.h>

namespace lockstep {

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

}  // namespace lockstep
