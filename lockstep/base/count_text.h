// Large numbers as people say them.
#pragma once

#include <string>

namespace lockstep {

// "7.00 B", "124.4 M", "12.5 k", "512".
std::string count_text(double count);

}  // namespace lockstep
