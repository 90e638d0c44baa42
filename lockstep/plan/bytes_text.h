// Sizes of memory as people write them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lockstep::plan {

// "13.0 GiB", "912.4 MiB".
std::string bytes_text(double bytes);

// "80GiB", "80 GB", "512MiB", "1.5T"; a number alone is bytes. UsageError naming `what` for
// anything else.
std::int64_t parse_bytes(std::string_view text, std::string_view what);

}  // namespace lockstep::plan
