// The table of models from TorchScript, with every strategy, and of tensors that belong to no
// module. Jobs of different sizes that are given the same folder go on from each other's
// checkpoints in it.
#pragma once

#include <string>

#include <tests/ranks/cells.h>

namespace lockstep {

void check_script_model(const std::string& folder, ranks::Cells& cells);

// A model that Python exported: it trains as in one process.
void check_exported_model(const std::string& file, ranks::Cells& cells);

}  // namespace lockstep
