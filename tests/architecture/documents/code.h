// The C++ of the pages as one translation unit, which compiles where all that they name is there.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "markdown.h"

namespace lockstep::documents {

// Objects that the pages speak of, as scene.h declares them; `dist.rank()` is code where
// `data.train` is a key of a config.
inline const std::set<std::string> kObjects = {"checkpoints", "copies",  "cut",  "dist",
                                               "loader",      "manager", "mesh", "pipe",
                                               "scaler",      "trainer"};

// What the library's headers declare, as far as it decides how a name is written to be compiled.
struct Declared {
  std::set<std::string> namespaces;  // "lockstep::nn"
  std::set<std::string> enums;       // "ReduceOp"
};
Declared declared_in(const std::filesystem::path& root);

// Every block of C++, and every name or expression of C++ within a line that is qualified, called
// on an object, or a statement, behind the headers that its page names.
std::string code_of(std::vector<Page> pages, const Declared& declared);

// Whether it is one of these; other names can only be looked for as words.
bool is_code(const std::string& span);

}  // namespace lockstep::documents
