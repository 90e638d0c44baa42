// What every rank has to say, on every rank.
#pragma once

#include <string>
#include <vector>

#include <lockstep/comm/communicator.h>

namespace lockstep::cli::inspection {

// Every rank's text, in rank order; tensors are made on `device`. Every rank calls it. CommError.
std::vector<std::string> gather_texts(comm::Communicator& world, const std::string& text);

}  // namespace lockstep::cli::inspection
