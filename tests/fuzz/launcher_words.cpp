// Messages between launchers.
#include <string>

#include <lockstep/base/error.h>
#include <lockstep/launch/rendezvous/messages.h>

#include "target.h"

namespace lockstep::fuzz {

namespace {

template <typename Word>
void read(const std::string& text) {
  std::string once;
  try {
    once = Word::decode(text).encode();
  } catch (const Error& error) {
    require(dynamic_cast<const InternalError*>(&error) == nullptr, "a bad text is no bug of ours");
    return;
  }
  require(once.find('\n') == std::string::npos, "a word is a line");
  require(Word::decode(once).encode() == once, "what was understood can be said again");
}

}  // namespace

void run(std::span<const std::byte> input) {
  const std::string text(reinterpret_cast<const char*>(input.data()), input.size());
  if (text.find('\n') != std::string::npos) return;  // no word can contain it
  read<launch::Introduction>(text);
  read<launch::RankTable>(text);
  read<launch::Decision>(text);
}

}  // namespace lockstep::fuzz
