// Loads the libraries in which models of one's own are.
#pragma once

#include <filesystem>
#include <string>

#include <lockstep/train/own_model.h>

namespace lockstep::train {

// The maker of the model of this name. The library stays loaded. UsageError if the file is not
// there, is no such library, was built with another Lockstep, LibTorch or standard library (told
// before anything in it runs), cannot be loaded, or has no model of the name.
MakeOwnModel load_own_model(const std::filesystem::path& library, const std::string& name);

}  // namespace lockstep::train
