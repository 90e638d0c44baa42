// Bytes that may come in place of etcd's answers.
#include <string>
#include <string_view>

#include <lockstep/base/error.h>
#include <lockstep/launch/rendezvous/etcd.h>

#include "target.h"

namespace lockstep::fuzz {

namespace {

template <typename Read>
void read_answer(const Read& read) {
  try {
    read();
  } catch (const CommError& error) {
    require(error.fault() == Fault::corrupted, "what is no answer is corrupted");
    require(std::string_view(error.what()).size() < 1000, "a message is short");
  }
}

}  // namespace

void run(std::span<const std::byte> input) {
  const std::string bytes(reinterpret_cast<const char*>(input.data()), input.size());
  read_answer([&] {
    const launch::HttpAnswer answer = launch::parse_http_answer(bytes);
    require(answer.status >= 100 && answer.status <= 599, "a status is one");
    require(answer.body.size() <= bytes.size(), "nothing is made up");
    read_answer([&] { launch::parse_granted_lease(answer.body); });
    read_answer([&] { launch::parse_kept_lease(answer.body); });
    read_answer([&] {
      const auto outcome = launch::parse_outcome(answer.body, 2);
      require(outcome.values.size() == 2, "all that was asked for is there");
      for (const auto& value : outcome.values)
        require(value.exists() || value.text.empty(), "what does not exist is empty");
    });
  });
}

}  // namespace lockstep::fuzz
