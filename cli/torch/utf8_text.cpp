#include <cli/torch/utf8_text.h>

#include <utility>

namespace lockstep::cli {

namespace {

constexpr const char* kReplacement = "\xEF\xBF\xBD";

}  // namespace

std::string Utf8Text::add(unsigned char byte) {
  std::string text;
  if (num_missing_ > 0) {
    if (byte >= low_ && byte <= high_) {
      pending_ += static_cast<char>(byte);
      low_ = 0x80;
      high_ = 0xBF;
      if (--num_missing_ == 0) text = std::exchange(pending_, "");
      return text;
    }
    text = finish();
  }
  if (byte < 0x80) return text + static_cast<char>(byte);
  if (byte < 0xC2 || byte > 0xF4) return text + kReplacement;
  // Neither longer forms of short characters, nor surrogates, nor what is above U+10FFFF.
  low_ = byte == 0xE0 ? 0xA0 : byte == 0xF0 ? 0x90 : 0x80;
  high_ = byte == 0xED ? 0x9F : byte == 0xF4 ? 0x8F : 0xBF;
  num_missing_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
  pending_ = static_cast<char>(byte);
  return text;
}

std::string Utf8Text::finish() {
  if (num_missing_ == 0) return "";
  num_missing_ = 0;
  pending_.clear();
  return kReplacement;
}

}  // namespace lockstep::cli
