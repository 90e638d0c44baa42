// The standard streams of ranks: pipes to the launcher, files, or both.
#pragma once

#include <array>
#include <filesystem>

#include <lockstep/elastic/logs.h>
#include <lockstep/net/fd.h>

namespace lockstep::elastic {

// One stream of one rank: what the rank writes to, and where we read it.
struct Plumbing {
  net::Fd rank_end;
  net::Fd our_end;  // empty where the rank writes to a file by itself
  net::Fd copy;
};

struct StreamChoices {
  StreamChoice redirects;  // to files only
  StreamChoice tee;        // to files as well
};

// Standard output and error of one rank, whose files are in `folder`, which is made where there are
// any. UsageError where a file cannot be written or no descriptor is left.
std::array<Plumbing, 2> lay_streams(const std::filesystem::path& folder, int local_rank,
                                    const StreamChoices& choices);

}  // namespace lockstep::elastic
