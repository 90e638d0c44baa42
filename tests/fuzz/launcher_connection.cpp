// Lines between launchers as a connection delivers them: in pieces, cut off, or without an end. The
// first byte of the input is the length of the pieces.
#include <algorithm>
#include <cstddef>

#include <sys/socket.h>

#include <lockstep/launch/rendezvous/connection.h>
#include <lockstep/net/socket.h>

#include "target.h"

namespace lockstep::fuzz {

void run(std::span<const std::byte> input) {
  if (input.empty()) return;
  const std::size_t piece = 1 + std::to_integer<std::size_t>(input.front()) * 16;
  input = input.subspan(1);
  auto [theirs, ours] = net::socket_pair();
  launch::Connection connection(std::move(ours));
  std::size_t heard = 0;
  const auto hear_all = [&] {
    while (const auto message = connection.receive()) {
      heard += message->word.size() + message->text.size();
      require(message->word.find('\n') == std::string::npos, "a word is of one line");
      require(message->text.find('\n') == std::string::npos, "a text is of one line");
      require(
          message->word.size() + message->text.size() <= launch::Connection::kLongestMessage + 1,
          "no message is longer than the longest");
    }
  };
  std::size_t sent = 0;
  while (!input.empty() && connection.open()) {
    const auto bytes = input.first(std::min(piece, input.size()));
    const ssize_t taken = ::send(theirs.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (taken <= 0) break;
    sent += static_cast<std::size_t>(taken);
    input = input.subspan(static_cast<std::size_t>(taken));
    hear_all();
  }
  theirs.reset();
  hear_all();
  require(heard <= sent, "nothing is heard that was not said");
  require(!connection.receive(), "nothing comes after the end");
}

}  // namespace lockstep::fuzz
