// Descriptors 0 to 2, which a caller may have closed.
#pragma once

namespace lockstep::cli {

// Puts /dev/null in the place of those of the three that are closed: the next file or pipe to be
// opened would get the number, and be taken for standard output. For before anything is opened.
void open_standard_streams();

}  // namespace lockstep::cli
