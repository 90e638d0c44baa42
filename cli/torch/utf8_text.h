// Bytes that come one at a time, as text that a terminal can show.
#pragma once

#include <string>

namespace lockstep::cli {

// Gives out characters once they are whole, and U+FFFD for what is no UTF-8: a model of bytes says
// such things. One thread.
class Utf8Text {
 public:
  // What can be written now.
  std::string add(unsigned char byte);
  // What is left at the end: a character that was cut short.
  std::string finish();

 private:
  std::string pending_;    // the beginning of a character
  int num_missing_ = 0;    // bytes that it still needs
  unsigned char low_ = 0;  // what the next of them may be
  unsigned char high_ = 0;
};

}  // namespace lockstep::cli
